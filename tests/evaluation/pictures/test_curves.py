from pathlib import Path
from typing import Any

import pytest

from mtkit.evaluation.pictures.curves import draw_curves, score_lines

PNG = b"\x89PNG\r\n\x1a\n"


def rows(updates: int) -> list[dict[str, Any]]:
    train = [
        {"kind": "train", "update": update, "nll": 5.0 / update, "rate": 1e-3, "gradient_norm": 1.0}
        for update in range(1, updates + 1)
    ]
    valid = [
        {"kind": "validation", "update": update, "nll": 6.0 / update, "bleu": 3.0 * update}
        for update in range(2, updates + 1, 2)
    ]
    return train + valid


@pytest.mark.parametrize("updates", [0, 1, 9])
def test_a_picture_is_drawn_whatever_there_is_so_far(tmp_path: Path, updates: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    draw_curves(rows(updates), path)
    assert path.read_bytes().startswith(PNG)
    assert [each.name for each in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize("updates", [1, 3])
def test_the_panels_of_a_short_run_have_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(made := subplots(*a, **k)) or made)
    draw_curves(rows(updates), tmp_path / "one")
    (panels,) = drawn
    for axes in panels:
        assert axes.get_xlim() == pytest.approx((0, 1.05 * updates))
        assert all(place % 1 == 0 for place in axes.get_xticks())
    named = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert named == ["training, with dropout", *["validation"] * (updates > 1)]


def test_the_picture_shows_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, updates in (("one", 8), ("other", 9)):
        draw_curves(rows(updates), tmp_path / name)
    draw_curves(rows(8), tmp_path / "again")
    one, other, again = ((tmp_path / name).read_bytes() for name in ("one", "other", "again"))
    assert one == again
    assert one != other


def test_one_row_of_training_shows(tmp_path: Path) -> None:
    """Without a mark a line of one point is nothing: the picture would be that of no training."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    draw_curves(rows(1), tmp_path / "one")
    drawn = imread(tmp_path / "one")[..., :3]
    blue = (drawn[..., 2] > drawn[..., 0] + 0.3) & (drawn[..., 2] > 0.5)
    height, width = blue.shape
    left = blue[height // 4 :, : width // 3]  # the losses, below their legend
    assert left.any()


def scored(update: int, signature: str, **scores: float) -> dict[str, Any]:
    return {"kind": "validation", "update": update, "signature": signature, **scores}


def test_scores_with_different_signatures_are_on_different_lines() -> None:
    found = [scored(1, "13a", bleu=1.0), scored(2, "13a", bleu=2.0, ter=9.0), scored(3, "zh", bleu=30.0)]
    assert score_lines(found, "bleu") == [("13a", [(1, 1.0), (2, 2.0)]), ("zh", [(3, 30.0)])]
    assert score_lines([*found, scored(4, "13a", bleu=3.0)], "bleu")[2:] == [("13a", [(4, 3.0)])]
    assert score_lines(found, "ter") == [("", [(2, 9.0)])]


def test_no_line_of_the_picture_joins_scores_with_different_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    drawn: list[tuple[Any, ...]] = []
    plot = axes.Axes.plot

    def watched(self: Any, *data: Any, **style: Any) -> Any:
        drawn.append(tuple(map(tuple, data)))
        return plot(self, *data, **style)

    monkeypatch.setattr(axes.Axes, "plot", watched)
    draw_curves([scored(1, "13a", bleu=1.0), scored(2, "13a", bleu=2.0), scored(3, "zh", bleu=30.0)], tmp_path / "one")
    assert {((1, 2), (1.0, 2.0)), ((3,), (30.0,))} <= set(drawn)
    draw_curves([scored(1, "13a", bleu=1.0, ter=70.0) | {"best_by": "ter", "ter_signature": "x"}], tmp_path / "two")
    assert drawn[-3] == ((1,), (70.0,))
