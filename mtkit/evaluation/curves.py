"""A picture of a training: loss, BLEU, learning rate and gradient norm over the updates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtkit.files import writing

Rows = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl: {"kind": "train" or "validation", "update": ..., and what was measured}."""

TRAINING, VALIDATION, RATE, NORM = "#1f77b4", "#d62728", "#2ca02c", "#8c8c8c"


def draw_curves(rows: Rows, path: Path) -> None:
    """Draw the metrics as a PNG: left the losses, in the middle BLEU, right the learning rate and gradient norm.

    Raises: MtkitError where it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure without pyplot: no window system, no state shared with the caller's own pictures
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    losses, bleus, rates = figure.subplots(1, 3)
    _losses(losses, rows)
    _bleus(bleus, rows)
    _rates(rates, rows)
    for axes in (losses, bleus, rates):
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with writing(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def _losses(axes: Any, rows: Rows) -> None:
    axes.set_title("loss in nats per target token")
    _line(axes, _series(rows, "train", "nll"), color=TRAINING, label="training, with dropout")
    updates, values = _series(rows, "validation", "nll")
    axes.plot(updates, values, color=VALIDATION, marker="o", markersize=3, label="validation")
    if values:
        axes.annotate(f"{values[-1]:.2f}", (updates[-1], values[-1]), xytext=(3, 6), textcoords="offset points")
    axes.legend(frameon=False)


def _bleus(axes: Any, rows: Rows) -> None:
    axes.set_title("validation BLEU")
    updates, values = _series(rows, "validation", "bleu")
    axes.plot(updates, values, color=VALIDATION, marker="o", markersize=3)
    axes.set_ylim(bottom=0)
    if values:
        best = max(range(len(values)), key=values.__getitem__)
        axes.axhline(values[best], color=VALIDATION, linewidth=0.8, linestyle=":")
        axes.set_title(f"validation BLEU, best {values[best]:.1f} at update {updates[best]}")


def _rates(axes: Any, rows: Rows) -> None:
    axes.set_title("learning rate and gradient norm")
    line = _line(axes, _series(rows, "train", "rate"), color=RATE, label="learning rate (left)")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    other = axes.twinx()
    norms = _series(rows, "train", "gradient_norm")
    norm = _line(other, norms, color=NORM, linewidth=0.8, label="gradient norm (right)")
    other.set_ylim(bottom=0)
    other.spines["top"].set_visible(False)
    axes.legend(handles=[line, norm], frameon=False)


def _line(axes: Any, series: tuple[list[int], list[float]], **style: Any) -> Any:
    """A line without marks, which one point would not show; that is marked."""
    (line,) = axes.plot(*series, marker="o" if len(series[0]) == 1 else None, markersize=3, **style)
    return line


def _series(rows: Rows, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Updates and values of one measurement."""
    points = [(row["update"], row[name]) for row in rows if row.get("kind") == kind and row.get(name) is not None]
    return [update for update, _ in points], [value for _, value in points]
