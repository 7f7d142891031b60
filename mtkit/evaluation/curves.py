"""A picture of a training: loss, validation score, learning rate and gradient norm over the updates."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from mtkit.files import writing

Rows = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl: {"kind": "train" or "validation", "update": ..., and what was measured}."""

TRAINING, VALIDATION, RATE, NORM = "#1f77b4", "#d62728", "#2ca02c", "#8c8c8c"

SHOWN = {"bleu": "BLEU", "chrf": "chrF", "exact": "exact match", "ter": "TER"}
"""Validation scores that a picture shows, by their key in metrics.jsonl."""


def draw_curves(rows: Rows, path: Path) -> None:
    """Draw the metrics as a PNG: left the losses, right the learning rate and gradient norm.

    In the middle is the validation score that chooses the best checkpoint, or BLEU if that is the loss. Scores with
    different signatures are not comparable: each signature has a line of its own.

    Raises: MtkitError where it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure without pyplot: no window system, no state shared with the caller's own pictures
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    losses, scores, rates = figure.subplots(1, 3)
    _losses(losses, rows)
    _scores(scores, rows)
    _rates(rates, rows)
    for axes in (losses, scores, rates):
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


def score_lines(rows: Rows, measure: str) -> list[tuple[str, list[tuple[int, float]]]]:
    """The validation scores by a measure of `SHOWN`, as (update, score) points, divided by signature.

    A new line begins whenever the signature changes; the last line is of the settings in force.
    """
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    for row in rows:
        if row.get("kind") == "validation" and row.get(measure) is not None:
            signature = row.get("signature" if measure == "bleu" else f"{measure}_signature", "")
            if not lines or lines[-1][0] != signature:
                lines.append((signature, []))
            lines[-1][1].append((row["update"], row[measure]))
    return lines


def _scores(axes: Any, rows: Rows) -> None:
    chosen = [row.get("best_by", "bleu") for row in rows if row.get("kind") == "validation"][-1:]
    measure = chosen[0] if chosen and chosen[0] in SHOWN else "bleu"
    axes.set_title(f"validation {SHOWN[measure]}")
    lines = score_lines(rows, measure)
    for number, (signature, points) in enumerate(lines, start=1):
        shade = 1.0 if number == len(lines) else 0.4
        axes.plot(*zip(*points, strict=True), color=VALIDATION, alpha=shade, marker="o", markersize=3, label=signature)
    axes.set_ylim(bottom=0)
    if lines:
        update, best = (min if measure == "ter" else max)(lines[-1][1], key=itemgetter(1))
        axes.axhline(best, color=VALIDATION, linewidth=0.8, linestyle=":")
        axes.set_title(f"validation {SHOWN[measure]}, best {best:.1f} at update {update}")
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize="small")


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
