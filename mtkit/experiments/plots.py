"""Label placement in a scatter plot: no label overlaps another label or a dot.

Scatter plot of a comparison: BLEU against decoding speed, a labelled dot per mechanism, coloured by family.

Bar charts of a comparison: BLEU with its confidence interval, and training speed.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtkit.attention import mechanisms
from mtkit.attention.registry import OTHERS
from mtkit.experiments.report import Results, row_name
from mtkit.storage.files import writing

DIRECTIONS = 24
"""Number of directions around a dot in which a label is tried at each distance."""
NEAREST, STEP, RINGS = 9.0, 7.0, 60
"""Distances from a dot to its label: smallest and step in pixels, and their number."""


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        """Return whether the boxes overlap by more than an edge."""
        apart = (
            self.left >= other.left + other.width
            or other.left >= self.left + self.width
            or self.bottom >= other.bottom + other.height
            or other.bottom >= self.bottom + self.height
        )
        return not apart

    def within(self, other: "Box") -> bool:
        """Return whether this box lies inside the other."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.left + self.width <= other.left + other.width
            and self.bottom + self.height <= other.bottom + other.height
        )


def label_places(
    dots: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, radius: float
) -> list[Box]:
    """Place a box for each label, near its dot and inside the frame, without overlap with other boxes and dots.

    Sizes, `frame` and the `radius` of the dots are in pixels. The most crowded dots come first, because they have the
    fewest free places. A label without a free place is put to the right of its dot.
    """
    discs = [Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in dots]
    crowding = [sum(1 / (1 + math.dist(dot, other)) for other in dots) for dot in dots]
    placed: dict[int, Box] = {}
    for number in sorted(range(len(dots)), key=lambda index: -crowding[index]):
        candidates = list(_around(dots[number], sizes[number]))
        taken = [*discs, *placed.values()]
        free = (box for box in candidates if box.within(frame) and not any(box.meets(other) for other in taken))
        placed[number] = next(free, candidates[0])
    return [placed[number] for number in range(len(dots))]


def _around(dot: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Yield boxes around a dot, the nearest first; at each distance, boxes on the right first."""
    width, height = size
    turns = sorted(range(DIRECTIONS), key=lambda index: min(index, DIRECTIONS - index))
    for ring in range(RINGS):
        distance = NEAREST + ring * STEP
        for turn in turns:
            angle = 2 * math.pi * turn / DIRECTIONS
            x, y = dot[0] + distance * math.cos(angle), dot[1] + distance * math.sin(angle)
            # the box lies on the side of (x, y) that is away from the dot
            yield Box(x - width * (1 - math.cos(angle)) / 2, y - height * (1 - math.sin(angle)) / 2, width, height)


COLORS = {
    "scoring": "#222222",
    "sparse": "#1f77b4",
    "content": "#17a2a2",
    "linear": "#d62728",
    "lowrank": "#ff7f0e",
    "compressed": "#9467bd",
    "prior": "#2ca02c",
    "heads": "#c2478f",
    OTHERS: "#7f7f7f",
}
"""Colours by family, in the order of the survey."""
DOT = 5.0
"""Radius of a dot in points."""
DPI = 150
BEST = 102.0
"""BLEU at which the height of the logarithmic scale would be infinite."""
TICKS = (99, 98, 95, 90, 85, 80, 75, 70, 60, 50, 40, 20, 0)
"""Ticks of the BLEU axis. If at most 3 of them are visible, matplotlib chooses the ticks."""


def draw_scatter(results: Results, path: Path) -> None:
    """Draw the mechanisms that have a score as a PNG. Raises: MtkitError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scored = [result for result in results if "bleu" in result]
    families = [mechanisms()[entry["attention"]].family for entry in scored]
    figure = Figure(figsize=(11, 8.5), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    speeds = [entry["decoding"]["tokens_per_second"] for entry in scored]
    scores = [entry["bleu"]["value"] for entry in scored]
    for family, color in COLORS.items():
        chosen = [place for place, member in enumerate(families) if member == family]
        if chosen:
            places = [speeds[place] for place in chosen], [scores[place] for place in chosen]
            axes.scatter(*places, s=(2 * DOT) ** 2, color=color, label=family, alpha=0.9, linewidths=0)
    # most scores are close to the best, so the axis is logarithmic in the distance to BEST
    axes.set_yscale("function", functions=(_missing, lambda missing: BEST - np.exp(-missing)))
    axes.set_xlabel("decoding speed, target tokens/s")
    axes.set_ylabel("BLEU")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if scored:
        figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)  # outside: a dot may be anywhere
        low, high = axes.get_ylim()
        inside = [tick for tick in TICKS if low < tick < high]
        if len(inside) > 3:
            axes.set_yticks(inside)
    canvas.draw()  # fixes the layout, so that pixel positions are final
    figure.set_layout_engine("none")
    texts = [axes.text(0, 0, row_name(entry), fontsize=8) for entry in scored]
    sizes = [(box.width, box.height) for box in (text.get_window_extent() for text in texts)]
    pixels = (axes.transData.transform(pair) for pair in zip(speeds, scores, strict=True))
    dots = [(float(x), float(y)) for x, y in pixels]
    window = axes.get_window_extent()
    frame = Box(window.x0, window.y0, window.width, window.height)
    back = axes.transData.inverted()
    for text, family, dot, box in zip(
        texts, families, dots, label_places(dots, sizes, frame, DOT * DPI / 72), strict=True
    ):
        color = COLORS[family]
        text.set(position=back.transform((box.left, box.bottom)), color=color, verticalalignment="bottom")
        end = min(max(dot[0], box.left), box.left + box.width), min(max(dot[1], box.bottom), box.bottom + box.height)
        line = back.transform([dot, end])
        axes.plot(line[:, 0], line[:, 1], color=color, linewidth=0.6, alpha=0.6, zorder=1, scalex=False, scaley=False)
    with writing(path) as temporary:
        canvas.print_png(str(temporary))


def _missing(score: np.ndarray) -> np.ndarray:
    """Return the heights of scores (N,) on the axis."""
    return -np.log(np.maximum(BEST - score, 1e-3))


BLEU, SPEED, FULL = "#1f77b4", "#2ca02c", "#444444"
ROOM = 0.15
"""Share of an axis to the right of the longest bar, for its number."""


def draw_comparison(results: Results, path: Path) -> None:
    """Draw the mechanisms that have a score as a PNG, with the best on top and `full` in a dark colour.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    scored = [result for result in results if "bleu" in result]
    # without pyplot: no window system, and no state shared with the caller's figures
    figure = Figure(figsize=(12, 1.3 + 0.32 * max(len(scored), 2)), layout="constrained")
    bleu, speed = figure.subplots(1, 2, sharey=True)
    names = [row_name(result) for result in scored]
    values = [result["bleu"]["value"] for result in scored]
    lows = [max(result["bleu"]["value"] - result["bleu"]["low"], 0.0) for result in scored]
    highs = [max(result["bleu"]["high"] - result["bleu"]["value"], 0.0) for result in scored]
    _bars(bleu, names, values, BLEU, [f"{value:.2f}" for value in values], highs)
    bleu.errorbar(values, range(len(names)), xerr=[lows, highs], fmt="none", ecolor="black", capsize=3, linewidth=1)
    bleu.set_title("BLEU with its 95% interval")
    speeds = [result["training"]["tokens_per_second"] for result in scored]
    _bars(speed, names, speeds, SPEED, [f"{value:,.0f}" for value in speeds], [0.0] * len(speeds))
    speed.set_title("training speed, target tokens/s")
    speed.xaxis.set_major_locator(MaxNLocator(4))
    speed.xaxis.set_major_formatter("{x:,.0f}")
    bleu.set_yticks(range(len(names)), names)
    bleu.set_ylim(max(len(names), 1) - 0.4, -0.6)
    with writing(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def _bars(
    axes: Any, names: list[str], values: list[float], color: str, labels: list[str], reaches: list[float]
) -> None:
    """Draw bars, each with its label to the right of its error bar, which extends by `reaches`."""
    colors = [FULL if name.split()[0] == "full" else color for name in names]
    axes.barh(range(len(names)), values, color=colors, alpha=0.85, height=0.7)
    longest = max((value + reach for value, reach in zip(values, reaches, strict=True)), default=0.0) or 1.0
    for row, (value, reach, label) in enumerate(zip(values, reaches, labels, strict=True)):
        axes.annotate(
            label, (value + reach, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize="small"
        )
    axes.set_xlim(0, longest * (1 + ROOM))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
