"""Scatter plot of a comparison: BLEU against decoding speed, a labelled dot per mechanism, coloured by family."""

from pathlib import Path

import numpy as np

from mtkit.attention import mechanisms
from mtkit.attention.registry import OTHERS
from mtkit.comparison.labels import Box, label_places
from mtkit.comparison.report import Results, row_name
from mtkit.files import writing

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

    scored = [each for each in results if "bleu" in each]
    families = [mechanisms()[each["attention"]].family for each in scored]
    figure = Figure(figsize=(11, 8.5), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    speeds = [each["decoding"]["tokens_per_second"] for each in scored]
    scores = [each["bleu"]["value"] for each in scored]
    for family, color in COLORS.items():
        chosen = [place for place, each in enumerate(families) if each == family]
        if chosen:
            places = [speeds[place] for place in chosen], [scores[place] for place in chosen]
            axes.scatter(*places, s=(2 * DOT) ** 2, color=color, label=family, alpha=0.9, linewidths=0)
    # most scores are close to the best, so the axis is logarithmic in the distance to BEST
    axes.set_yscale("function", functions=(_missing, lambda each: BEST - np.exp(-each)))
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
        inside = [each for each in TICKS if low < each < high]
        if len(inside) > 3:
            axes.set_yticks(inside)
    canvas.draw()  # fixes the layout, so that pixel positions are final
    figure.set_layout_engine("none")
    texts = [axes.text(0, 0, row_name(each), fontsize=8) for each in scored]
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
