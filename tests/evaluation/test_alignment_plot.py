from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from mtkit.evaluation.alignment_plot import draw_alignment

WEIGHTS = [[0.5, 0.5, 0.0], [0.0, 0.1, 0.9]]


def test_a_picture_has_a_cell_for_each_pair_of_pieces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_alignment(["▁a", "b", "</s>"], ["▁c", "</s>"], WEIGHTS, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(("source", "target"), [(600, 600), (1100, 3)])
def test_what_is_too_large_to_draw_is_refused(source: int, target: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weights = [[1.0] * source] * target
    with pytest.raises(MtkitError, match=f"{source} x {target} pieces is too large to draw; give a shorter text"):
        draw_alignment(["a"] * source, ["b"] * target, weights, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_letter_without_a_font_is_told_and_drawn_as_a_box(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    unassigned = "\u0378"
    assert not draw_alignment([unassigned, "b", "</s>"], ["▁c", "</s>"], WEIGHTS, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
