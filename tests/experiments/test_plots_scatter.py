from pathlib import Path

import pytest

from mtkit.attention import mechanisms
from mtkit.attention.registry import OTHERS
from mtkit.experiments.plots import COLORS, draw_scatter
from tests.experiments.results import result

pytest.importorskip("matplotlib")


def test_every_family_has_a_colour_of_its_own() -> None:
    assert {each.family for each in mechanisms().values()} | {OTHERS} == set(COLORS)
    assert len(set(COLORS.values())) == len(COLORS)


@pytest.mark.parametrize("count", [0, 1, 61])
def test_a_picture_is_drawn_whatever_there_is_so_far(tmp_path: Path, count: int) -> None:
    rows = [result(name, 80.0 + number / 10) for number, name in enumerate(list(mechanisms())[:count])]
    draw_scatter([*rows, {"attention": "band", "failed": "why"}], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
