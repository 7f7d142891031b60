"""Pictures of attention: pieces attended to across, those that attend down, the darker the more attended."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError
from mtkit.files import writing

if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment

CELL = 0.3
"""Width and height of a cell in inches."""
SMALL_CELL = 0.16
"""The same in a picture of all layers and heads."""
LARGEST = 300.0
"""Width and height in inches, at most: matplotlib draws 100 dots each, up to 65,536."""
MOST = 22_500.0
"""Square inches, at most: with 10,000 dots of four bytes each, 900 MB."""
OWN_FONT = "DejaVu Sans"
"""That which comes with matplotlib."""
BOXES = ("Last Resort", "LastResort")
"""Parts of the names of fonts that have a box for every letter."""


def draw_alignment(
    source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]], path: Path
) -> bool:
    """Draw weights, T rows of S, beside their pieces as a PNG; False where a letter has no installed font.

    Raises: MtkitError where it cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure

    size = (1.6 + CELL * len(source), 1.6 + CELL * len(target))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(f"a picture of {len(source)} x {len(target)} pieces is too large to draw; give a shorter text")
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _draw_map(axes, source, target, weights, 10, _families([*source, *target]))
    return _save(figure, path)


def draw_attention(aligned: "Alignment", path: Path) -> bool:
    """Draw the weights of every layer and head as a PNG; False where a letter has no installed font.

    A row holds the heads of a layer, those of the attention to the source first, then the encoder's and the decoder's.
    Layers without weights are left out.

    Raises: MtkitError where it cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure

    sides = {
        "cross": (aligned.source, aligned.target),
        "encoder": (aligned.source, aligned.source),
        "decoder": (aligned.read, aligned.target),
    }
    maps = [
        (role, layer, weights)
        for role in sides
        for layer, weights in enumerate(aligned.layers.get(role, []), start=1)
        if weights is not None
    ]
    heads = max(len(weights) for *_, weights in maps)
    widest, tallest = max(len(across) for across, _ in sides.values()), max(len(down) for _, down in sides.values())
    size = (heads * (1.2 + SMALL_CELL * widest), len(maps) * (1.4 + SMALL_CELL * tallest))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(
            f"a picture of {len(maps)} layers of up to {heads} heads over {widest} x {tallest} pieces is too large to "
            "draw; give a shorter text"
        )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False)
    families = _families([piece for pieces in sides.values() for side in pieces for piece in side])
    for row, (role, layer, weights) in zip(grid, maps, strict=True):
        across, down = sides[role]
        for head, axes in enumerate(row):
            if head < len(weights):
                _draw_map(axes, across, down, weights[head].tolist(), 6, families)
                axes.set_xlabel(f"{role}, layer {layer}, head {head + 1}", fontsize=8)
            else:
                axes.axis("off")
    return _save(figure, path)


def _draw_map(
    axes: Any,
    across: Sequence[str],
    down: Sequence[str],
    weights: Sequence[Sequence[float]],
    size: int,
    families: Sequence[str],
) -> None:
    """One map; `size` of the letters in points, `families` of fonts that have them."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    # a dollar sign in a piece is no formula
    axes.set_xticks(range(len(across)), across, rotation=90, fontfamily=families, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(down)), down, fontfamily=families, fontsize=size, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xticks([each + 0.5 for each in range(len(across) - 1)], minor=True)
    axes.set_yticks([each + 0.5 for each in range(len(down) - 1)], minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="minor", length=0)


def _families(pieces: Sequence[str]) -> list[str]:
    """matplotlib's own font, and by name the first installed fonts that have the letters which it lacks."""
    from matplotlib import font_manager

    families = [OWN_FONT]
    lacking = set("".join(pieces))
    lacking -= _letters(font_manager.findfont(OWN_FONT), lacking)
    if lacking:
        _add_new_fonts()
    for font in sorted(font_manager.fontManager.ttflist, key=lambda each: each.name):
        if not lacking:
            break
        if font.name in families or any(part in font.name for part in BOXES) or not _letters(font.fname, lacking):
            continue
        # text is drawn in the plainest font of a family, which may have fewer letters
        if found := _letters(font_manager.findfont(font.name), lacking):
            families.append(font.name)
            lacking -= found
    return families


def _add_new_fonts() -> None:
    """Add the fonts that were installed after matplotlib stored its list, which it never renews by itself."""
    from matplotlib import font_manager

    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            with suppress(Exception):  # a damaged font; matplotlib passes over any fault of one too
                font_manager.fontManager.addfont(path)


def _letters(path: str, letters: Iterable[str]) -> set[str]:
    """Those of the letters that a font has; none where its file is gone or damaged."""
    from matplotlib.ft2font import FT2Font

    try:
        # not font_manager.get_font, which answers for the fonts behind it too
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return set()
    return {letter for letter in letters if font.get_char_index(ord(letter))}


def _save(figure: Any, path: Path) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings(record=True) as caught, writing(path) as temporary:
        warnings.simplefilter("always")
        FigureCanvasAgg(figure).print_png(str(temporary))
    return not any("missing from" in str(each.message) for each in caught)
