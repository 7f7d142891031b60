from pathlib import Path
from typing import Any

import pytest

from mtkit.decoding.output_steps import Step
from mtkit.errors import MtkitError
from mtkit.evaluation.plots import draw_steps


def test_a_picture_of_steps_frames_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches = pytest.importorskip("matplotlib.patches")
    framed: list[tuple[float, float]] = []

    class Framed(patches.Rectangle):  # type: ignore[name-defined, misc]
        def __init__(self, corner: tuple[float, float], *rest: Any, **named: Any) -> None:
            framed.append(corner)
            super().__init__(corner, *rest, **named)

    monkeypatch.setattr(patches, "Rectangle", Framed)
    steps = [
        Step("b", 0.3, 2, 1.0, (("$a", 0.5), ("b", 0.3))),
        Step("z", 0.01, 9, 1.0, (("a", 0.5), ("b", 0.3))),
    ]
    assert draw_steps(steps, tmp_path / "a.png")
    assert [corner for corner in framed if corner != (0.0, 0.0)] == [pytest.approx((-0.48, 0.52))]


def test_a_row_of_others_and_ranks_beyond_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(axes := subplots(*a, **k)) or axes)
    draw_steps([Step("z", 0.01, 9, 1.0, (("a", 0.5), ("b", 0.25)))], tmp_path / "a.png")
    (axes,) = drawn
    assert axes.images[0].get_array().tolist() == [[0.5], [0.25], [0.25]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["z (rank 9)"]


def test_too_many_steps_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(MtkitError, match="a picture of 400 pieces is too large to draw; give a shorter text"):
        draw_steps([Step("z", 1.0, 1, 0.0, (("z", 1.0),))] * 400, tmp_path / "a.png")
