from pathlib import Path

import pytest

from mtkit.experiments.plots import draw_comparison
from tests.experiments.results import result

pytest.importorskip("matplotlib")


def height(path: Path) -> int:
    """In pixels, from the header of a PNG."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[20:24])


def test_the_picture_grows_with_its_rows(tmp_path: Path) -> None:
    heights = []
    for count in (0, 3, 25):
        draw_comparison([result(f"one-{number}", 90.0 - number) for number in range(count)], tmp_path / "a.png")
        heights.append(height(tmp_path / "a.png"))
    assert heights[2] - heights[1] > 20 * 25
    assert heights[1] > heights[0]


def test_failures_have_no_bar(tmp_path: Path) -> None:
    rows = [result("full", 3.0), result("zero", 0.0)]
    draw_comparison(rows, tmp_path / "a.png")
    draw_comparison([*rows, {"attention": "band", "failed": "why"}], tmp_path / "b.png")
    assert height(tmp_path / "a.png") == height(tmp_path / "b.png")
