"""Bar charts of a comparison: BLEU with its confidence interval, and training speed."""

from pathlib import Path
from typing import Any

from mtkit.comparison.report import Results, row_name
from mtkit.files import writing

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
