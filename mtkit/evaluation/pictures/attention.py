"""Pictures of attention weights: keys on the x axis, queries on the y axis, darker for larger weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.figures import LARGEST, MOST, font_families, save_figure

if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment

CELL = 0.3
"""Cell width and height in inches."""
SMALL_CELL = 0.16
"""Cell width and height in a plot of all layers and heads, in inches."""
CAPTION = 1.8
"""Minimum width of a map in such a plot, in inches, so that its caption fits."""


def draw_alignment(
    source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]], path: Path
) -> bool:
    """Draw weights (T, S) with their pieces as a PNG. Return False if no installed font has some letter.

    Raises: MtkitError if the file cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure

    size = (1.6 + CELL * len(source), 1.6 + CELL * len(target))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(f"a picture of {len(source)} x {len(target)} pieces is too large to draw; give a shorter text")
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _draw_map(axes, source, target, weights, 10, font_families([*source, *target]))
    return save_figure(figure, path)


def draw_attention(aligned: "Alignment", path: Path) -> bool:
    """Draw the weights of every layer and head as a PNG. Return False if no installed font has some letter.

    A row shows the heads of a layer: first the cross attention, then the encoder and the decoder. Layers without
    weights are left out.

    Raises: MtkitError if the file cannot be written or is too large to draw.
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
    drawn = [sides[role] for role, *_ in maps]
    widest, tallest = max(len(across) for across, _ in drawn), max(len(down) for _, down in drawn)
    heights = [1.4 + SMALL_CELL * len(down) for _, down in drawn]
    size = (heads * max(1.2 + SMALL_CELL * widest, CAPTION), sum(heights))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(
            f"a picture of {len(maps)} layers of up to {heads} heads over {widest} x {tallest} pieces is too large to "
            "draw; give a shorter text"
        )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False, height_ratios=heights)
    families = font_families([piece for pieces in drawn for side in pieces for piece in side])
    for row, (role, layer, weights) in zip(grid, maps, strict=True):
        across, down = sides[role]
        for head, axes in enumerate(row):
            if head < len(weights):
                _draw_map(axes, across, down, weights[head].tolist(), 6, families)
                axes.set_xlabel(f"{role}, layer {layer}, head {head + 1}", fontsize=8)
            else:
                axes.axis("off")
    return save_figure(figure, path)


def _draw_map(
    axes: Any,
    across: Sequence[str],
    down: Sequence[str],
    weights: Sequence[Sequence[float]],
    size: int,
    families: Sequence[str],
) -> None:
    """Draw one map, with letters of `size` points from the font `families`."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    # parse_math: a dollar sign in a piece does not start a formula
    axes.set_xticks(range(len(across)), across, rotation=90, fontfamily=families, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(down)), down, fontfamily=families, fontsize=size, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xticks([place + 0.5 for place in range(len(across) - 1)], minor=True)
    axes.set_yticks([place + 0.5 for place in range(len(down) - 1)], minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
