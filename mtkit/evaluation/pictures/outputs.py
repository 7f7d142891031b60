"""The picture of output distributions: the likeliest pieces of each step."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.figures import LARGEST, font_families, save_figure

if TYPE_CHECKING:
    from mtkit.decoding.output_steps import Step

FRAME = "#d62728"
"""Colour of the frame around the translation's piece."""

STEP_WIDTH, STEP_HEIGHT = 0.95, 0.42
"""Cell width and height in a plot of output distributions, in inches."""
PIECE_WIDTH = 12
"""Letters that fit into such a cell; a wide letter, such as a Chinese one, counts as two."""


def draw_steps(steps: "Sequence[Step]", path: Path) -> bool:
    """Draw the likeliest pieces of each step as a PNG. Return False if no installed font has some letter.

    A column is a step, below the piece of the translation; a cell has a piece and its probability, and the piece of the
    translation has a frame. The last row is the probability of all other pieces.

    Raises: MtkitError if the file cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    ranks = max(len(step.top) for step in steps)
    size = (1.2 + STEP_WIDTH * len(steps), 1.6 + STEP_HEIGHT * (ranks + 1))
    if max(size) > LARGEST:
        raise MtkitError(f"a picture of {len(steps)} pieces is too large to draw; give a shorter text")
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    columns = [[value for _, value in step.top] for step in steps]
    rest = [max(0.0, 1.0 - sum(column)) for column in columns]
    table = [[column[rank] for column in columns] for rank in range(ranks)] + [rest]
    axes.imshow(table, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    families = font_families([piece for step in steps for piece in (step.piece, *(name for name, _ in step.top))])
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "fontfamily": families, "parse_math": False}
    for place, (step, other) in enumerate(zip(steps, rest, strict=True)):
        cells = [*((f"{_short(name)}\n{value:.2f}", value) for name, value in step.top), (f"{other:.2f}", other)]
        for rank, (text, value) in enumerate(cells):
            axes.text(place, rank, text, color="white" if value > 0.55 else "black", **style)
        names = [name for name, _ in step.top]
        if step.piece in names:
            corner = (place - 0.48, names.index(step.piece) - 0.48)
            axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor=FRAME, linewidth=1.5))
    heads = [_short(step.piece) + f"\n(rank {step.rank})" * (step.rank > ranks) for step in steps]
    axes.set_xticks(range(len(steps)), heads, fontsize=8, fontfamily=families, parse_math=False)
    axes.set_yticks(range(ranks + 1), [*(str(rank) for rank in range(1, ranks + 1)), "others"])
    axes.set_ylabel("rank")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return save_figure(figure, path)


def _short(piece: str) -> str:
    """Return the piece, or its beginning with an ellipsis if it is wider than a cell."""
    widths = accumulate(2 if east_asian_width(letter) in "WF" else 1 for letter in piece)
    fits = sum(width <= PIECE_WIDTH for width in widths)
    return piece if fits == len(piece) else f"{piece[: fits - 1]}\u2026"
