from pathlib import Path
from typing import Any

import pytest

from mtkit.evaluation.curves import draw_curves

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
