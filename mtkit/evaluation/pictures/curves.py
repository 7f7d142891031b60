"""The picture of a training: losses, validation score, learning rate and gradient norm by update."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from mtkit.evaluation.pictures.figures import save_figure

Rows = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl: {"kind": "train" or "validation", "update": ..., and the measurements}."""

TRAINING, VALIDATION, RATE, NORM = "#1f77b4", "#d62728", "#2ca02c", "#8c8c8c"

SHOWN = {"bleu": "BLEU", "chrf": "chrF", "exact": "exact match", "token": "token match", "ter": "TER"}
"""Names of the plotted validation scores, by their key in metrics.jsonl."""


def draw_curves(rows: Rows, path: Path) -> None:
    """Draw the metrics as a PNG: losses (left), validation score (middle), learning rate and gradient norm (right).

    The validation score is the score that selects the best checkpoint, or BLEU if the loss selects it. Scores with
    different signatures are not comparable, so each signature has its own line.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    # without pyplot: no window system, and no state shared with the caller's figures
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    losses, scores, rates = figure.subplots(1, 3)
    _losses(losses, rows)
    _scores(scores, rows)
    _rates(rates, rows)
    for axes in (losses, scores, rates):
        axes.set_xlabel("update")
        axes.set_xlim(0, max((row["update"] for row in rows), default=0) * 1.05 or None)
        axes.locator_params("x", integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _losses(axes: Any, rows: Rows) -> None:
    axes.set_title("loss in nats per target token")
    _line(axes, _series(rows, "train", "nll"), color=TRAINING, label="training, with dropout")
    updates, values = _series(rows, "validation", "nll")
    if values:
        axes.plot(updates, values, color=VALIDATION, marker="o", markersize=3, label="validation")
        axes.annotate(f"{values[-1]:.2f}", (updates[-1], values[-1]), xytext=(3, 6), textcoords="offset points")
    axes.legend(frameon=False)


def score_lines(rows: Rows, measure: str) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the validation scores of a measure in `SHOWN` as lines of (update, score) points, with their signatures.

    A new line begins whenever the signature changes; the last line has the current signature.
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
    axes.legend(handles=[curve for curve in (line, norm) if len(curve.get_xdata())], frameon=False)


def _line(axes: Any, series: tuple[list[int], list[float]], **style: Any) -> Any:
    """Plot a line; a single point gets a marker, because a line would not show it."""
    (line,) = axes.plot(*series, marker="o" if len(series[0]) == 1 else None, markersize=3, **style)
    return line


def _series(rows: Rows, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Return the updates and values of one measurement."""
    points = [(row["update"], row[name]) for row in rows if row.get("kind") == kind and row.get(name) is not None]
    return [update for update, _ in points], [value for _, value in points]
