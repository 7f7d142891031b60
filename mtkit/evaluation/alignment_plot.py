"""Pictures of attention: pieces attended to across, those that attend down, the darker the more attended."""

import warnings
from collections.abc import Sequence
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
MORE_SCRIPTS = ("CJK", "Gothic", "Hei", "Ming", "Song", "Arabic", "Hebrew", "Devanagari", "Thai", "Unicode")
"""Parts of the names of fonts that have letters which matplotlib's own font lacks."""


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
    _draw_map(axes, source, target, weights, 10)
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
    for row, (role, layer, weights) in zip(grid, maps, strict=True):
        across, down = sides[role]
        for head, axes in enumerate(row):
            if head < len(weights):
                _draw_map(axes, across, down, weights[head].tolist(), 6)
                axes.set_xlabel(f"{role}, layer {layer}, head {head + 1}", fontsize=8)
            else:
                axes.axis("off")
    return _save(figure, path)


def _draw_map(
    axes: Any, across: Sequence[str], down: Sequence[str], weights: Sequence[Sequence[float]], size: int
) -> None:
    """One map; `size` of the letters in points."""
    from matplotlib import font_manager

    installed = {each.name for each in font_manager.fontManager.ttflist}
    families = ["DejaVu Sans", *sorted(name for name in installed if any(part in name for part in MORE_SCRIPTS))]
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


def _save(figure: Any, path: Path) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings(record=True) as caught, writing(path) as temporary:
        warnings.simplefilter("always")
        FigureCanvasAgg(figure).print_png(str(temporary))
    return not any("missing from" in str(each.message) for each in caught)
