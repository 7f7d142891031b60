from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.decoding.alignment import Alignment
from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.attention import draw_alignment, draw_attention
from mtkit.evaluation.pictures.figures import font_families
from mtkit.model.layers import Weights

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


def maps(layers: Weights, source: int, target: int, monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """The axes of the maps of every layer and head, with so many pieces."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(made := subplots(*a, **k)) or made)
    draw_attention(Alignment(["a"] * source, ["b"] * target, layers), path)
    return drawn[0]


def test_a_picture_has_the_size_of_the_maps_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cross, encoder, decoder = (torch.rand(1, *size) for size in ((2, 30), (30, 30), (2, 2)))
    ((only,),) = maps({"cross": [cross]}, 30, 2, monkeypatch, tmp_path / "a.png")
    assert only.figure.get_figheight() < 2
    (above,), (below,) = maps({"cross": [cross], "encoder": [encoder]}, 30, 2, monkeypatch, tmp_path / "a.png")
    assert above.get_window_extent().width == pytest.approx(below.get_window_extent().width, rel=0.05)
    ((small,),) = maps({"decoder": [decoder]}, 30, 2, monkeypatch, tmp_path / "a.png")
    assert small.figure.get_figwidth() < 2


def test_captions_of_small_maps_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: Weights = {"decoder": [None] * 11 + [torch.rand(2, 1, 1)]}
    ((one, other),) = maps(layers, 1, 1, monkeypatch, tmp_path / "a.png")
    assert one.xaxis.label.get_window_extent().x1 < other.xaxis.label.get_window_extent().x0


def test_a_letter_without_a_font_is_told_and_drawn_as_a_box(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    unassigned = "\u0378"
    assert not draw_alignment([unassigned, "b", "</s>"], ["▁c", "</s>"], WEIGHTS, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_a_letter_is_drawn_in_whichever_font_has_it(tmp_path: Path) -> None:
    """STIXGeneral, which comes with matplotlib, has a letter that DejaVu Sans lacks."""
    fonts = pytest.importorskip("matplotlib.font_manager")
    letter = "\u1d81"
    own = fonts.get_font(fonts.findfont("DejaVu Sans"))
    assert not own.get_char_index(ord(letter))
    assert draw_alignment([letter, "b", "</s>"], ["▁c", "</s>"], WEIGHTS, tmp_path / "a.png")
    assert font_families(["▁abc"]) == ["DejaVu Sans"]


def test_fonts_that_cannot_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fonts = pytest.importorskip("matplotlib.font_manager")
    damaged = tmp_path / "damaged.ttf"
    damaged.write_bytes(b"no font")
    gone = [fonts.FontEntry(fname=str(path), name=f"A {path.stem}") for path in (damaged, tmp_path / "gone.ttf")]
    monkeypatch.setattr(fonts.fontManager, "ttflist", [*gone, *fonts.fontManager.ttflist])
    assert not {each.name for each in gone} & set(font_families(["\u1d81"]))


def test_fonts_installed_after_matplotlib_listed_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts = pytest.importorskip("matplotlib.font_manager")
    letter, listed = "\u1d81", fonts.fontManager.ttflist
    (new,) = font_families([letter])[1:]
    monkeypatch.setattr(fonts.fontManager, "ttflist", [font for font in listed if font.name == "DejaVu Sans"])
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: [])
    assert font_families([letter]) == ["DejaVu Sans"]
    paths = [font.fname for font in listed if font.name == new]
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: [__file__, *paths])
    assert font_families([letter]) == ["DejaVu Sans", new]
