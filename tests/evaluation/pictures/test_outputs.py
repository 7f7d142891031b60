from pathlib import Path
from typing import Any

import pytest

from mtkit.decoding.output_steps import Step
from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.outputs import _short, draw_steps


def drawn(steps: list[Step], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The axes of the picture."""
    figures = pytest.importorskip("matplotlib.figure")
    made: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: made.append(axes := subplots(*a, **k)) or axes)
    assert draw_steps(steps, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return made[0]


def test_the_piece_of_the_translation_has_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        Step("b", 0.3, 2, 1.0, (("$a", 0.5), ("b", 0.3))),
        Step("z", 0.01, 9, 1.0, (("a", 0.5), ("b", 0.3))),
    ]
    (frame,) = drawn(steps, tmp_path / "a.png", monkeypatch).patches
    assert frame.get_xy() == pytest.approx((-0.48, 0.52))


def test_a_row_of_others_and_ranks_beyond_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn([Step("z", 0.01, 9, 1.0, (("a", 0.5), ("b", 0.25)))], tmp_path / "a.png", monkeypatch)
    assert axes.images[0].get_array().tolist() == [[0.5], [0.25], [0.25]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["z\n(rank 9)"]
    assert [text.get_text() for text in axes.texts] == ["a\n0.50", "b\n0.25", "0.25"]


def test_names_of_full_width_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn([Step("commandments", 0.5, 1, 1.0, (("a", 0.5),))] * 3, tmp_path / "a.png", monkeypatch)
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert boxes[0].x1 < boxes[1].x0 < boxes[1].x1 < boxes[2].x0


def test_too_many_steps_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(MtkitError, match="a picture of 400 pieces is too large to draw; give a shorter text"):
        draw_steps([Step("z", 1.0, 1, 0.0, (("z", 1.0),))] * 400, tmp_path / "a.png")


def test_a_piece_wider_than_its_cell_is_cut() -> None:
    assert _short("m" * 12) == "m" * 12
    assert _short("m" * 13) == "m" * 11 + "\u2026"
    assert _short("\u5e74" * 7) == "\u5e74" * 5 + "\u2026"
