"""Learning curves: validation quality over updates, tokens, seconds and FLOPs, with a band over seeds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtkit.evaluation.pictures.curves import SHOWN
from mtkit.experiments.pictures.canvas import FAINT, INK, STYLES, entitle, new_figure, shortened
from mtkit.experiments.pictures.points import Point, is_wide, logarithmic, omissions, scale_of, scored, to_label

ACROSS = {
    "updates": ("update", "updates"),
    "tokens": ("tokens", "target tokens"),
    "seconds": ("seconds", "training time, seconds"),
    "FLOPs": ("flops", "training FLOPs"),
}
"""Panels: the key of a validation and the axis title."""
MOST = 8
"""Number of best entries that are drawn in colour; the first entry is too, the others are grey."""
DEVIATIONS = 5
"""Number of seeds in a study from which on bands are standard deviations; with fewer seeds, bands are ranges."""
LINES = [*list(STYLES.values())[1:MOST], ("#96c378", "p")]
"""Colours and markers of the entries in colour; the first entry is dark. The grey of families is no colour here."""
LONGER = 1.1
"""Ratio to the length of the mean's line from which the rest of a longer seed is drawn."""


class Curve(NamedTuple):
    """An entry's learning curve over the range that all its seeds have, on the seeds' common points."""

    x: np.ndarray
    """Points (N,): every x of a seed in that range."""
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    tails: list[tuple[np.ndarray, np.ndarray]]
    """Rest of the seeds that continue after this range; the seeds if they have no common range."""


def curve_of(
    seeds: Sequence[Sequence[Mapping[str, Any]]], across: str, measure: str, *, deviation: bool = False
) -> Curve | None:
    """Return the mean of seeds, interpolated linearly, and its band; None if no seed has such a measurement.

    The band is the range of the seeds, or with `deviation` the standard deviation around the mean.
    """
    lines = [line for seed in seeds if len((line := _line(seed, across, measure))[0])]
    if not lines:
        return None
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    points = np.unique(np.concatenate([x for x, _ in lines]))
    points = points[(points >= start) & (points <= end)]
    rows = np.stack([np.interp(points, x, y) for x, y in lines])  # (seeds, N)
    mean = rows.mean(0)
    if deviation and len(lines) > 1:
        spread = rows.std(0, ddof=1)
        low, high = mean - spread, mean + spread
    else:
        low, high = rows.min(0), rows.max(0)
    # where a seed has ended, the others are not averaged: the mean would jump
    tails = [(x[x >= end], y[x >= end]) for x, y in lines if x[-1] > LONGER * end] if start <= end else lines
    return Curve(points, mean, low, high, tails)


def draw_curves(points: Sequence[Point], metric: str, title: str) -> Any:
    """Return a figure with a panel per measure of training that is known; None if there is no learning curve.

    The metric is drawn if validations have it, else the loss.
    """
    entries = [point for point in scored(points) if any(point.curves)]
    names = {shown if shown in ("BLEU", "chrF", "TER") else key: key for key, shown in SHOWN.items()} | {"loss": "nll"}
    has = [key for key in (names.get(metric), "nll") if key and _has(entries, key)]
    panels = {name: pair for name, pair in ACROSS.items() if has and _has(entries, pair[0])}
    if not panels:
        return None
    metric = metric if has[0] == names.get(metric) else "loss"
    entries = [point for point in entries if np.isfinite(_final(point, has[0]))]
    if not entries:
        return None
    finals = [_final(point, has[0]) for point in entries]
    scale = scale_of(metric, finals)
    order = sorted(range(len(entries)), key=lambda index: finals[index] if scale.lower else -finals[index])
    bright = [entries[index] for index in order][:MOST]
    if points[0] in entries and points[0] not in bright:
        bright.append(points[0])
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    figure = new_figure(12, 0.9 + 4.2 * rows)
    grid = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    styles = _styles(bright, points[0])
    most = max(len(point.curves) for point in entries)
    for axes, (across, label) in zip(grid, panels.values(), strict=False):
        _panel(axes, entries, styles, across, has[0], deviation=most >= DEVIATIONS)
        axes.set_xlabel(label)
    scale.apply(grid[0], "y")
    for axes in grid[: len(panels) : columns]:
        axes.set_ylabel(f"validation {scale.title}  (better →)")
    band = f"standard deviation of {most} seeds" if most >= DEVIATIONS else f"range of {most} seeds"
    grey = len(entries) - len(bright)
    entitle(
        figure,
        f"{title}: validation {scale.name}" + (f", mean and {band}" if most > 1 else ""),
        f"In colour: the best {MOST} and the first entry; in grey: {grey} more." if grey else "",
        "Thin lines and small dots: seeds outside the range that all seeds have." if _any_tails(grid) else "",
        omissions(points),
    )
    # by hand: matplotlib leaves labels that begin with _ out
    lines = {line.get_gid(): line for line in grid[0].get_lines() if line.get_gid() in styles}
    labels = [short + " (first entry)" * (name == points[0].name) for name, short in shortened(lines).items()]
    figure.legend([*lines.values()], labels, loc="outside right upper", title="best first")
    return figure


def _styles(bright: Sequence[Point], first: Point) -> dict[str, dict[str, Any]]:
    """Return the line style of each entry in colour, by name; the first entry is dark."""
    others = [point for point in bright if point is not first]
    styles = {
        point.name: {"color": color, "marker": marker} for point, (color, marker) in zip(others, LINES, strict=False)
    }
    return {point.name: styles.get(point.name, {"color": INK, "marker": "o"}) for point in bright}


def _panel(
    axes: Any,
    entries: Sequence[Point],
    styles: Mapping[str, dict[str, Any]],
    across: str,
    measure: str,
    *,
    deviation: bool,
) -> None:
    """Draw the curves: first the grey ones, then those in colour from the best, which also is the legend's order."""
    ends: list[float] = []
    for point in sorted(entries, key=lambda point: [*styles].index(point.name) if point.name in styles else -1):
        curve = curve_of(point.curves, across, measure, deviation=deviation)
        if curve is None:
            continue
        ends += [float(x[-1]) for x in (curve.x, *(x for x, _ in curve.tails)) if len(x)]
        if style := styles.get(point.name):
            every = max(1, len(curve.x) // 6)
            axes.plot(
                curve.x, curve.mean, linewidth=1.8, markersize=5, markevery=every,
                zorder=4 - len(ends) / 1e3,  # the best on top
                gid=point.name, **style,
            )  # fmt: skip
            axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.14, linewidth=0, zorder=2)
        else:
            axes.plot(
                curve.x, curve.mean, color=FAINT, linewidth=0.7, alpha=0.6, zorder=1, gid=point.name,
                marker="." if len(curve.x) == 1 else None,
            )  # fmt: skip
        for x, y in curve.tails:
            axes.plot(
                x, y, color=style["color"] if style else FAINT, linewidth=0.7, marker="." if len(x) == 1 else None,
                gid=f"tail {point.name}",
            )  # fmt: skip
    if is_wide(ends):
        logarithmic(axes, "x")
    else:
        axes.xaxis.set_major_formatter(to_label)


def _line(seed: Sequence[Mapping[str, Any]], across: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a seed, by increasing x, without missing numbers and infinities."""
    pairs = {
        float(row[across]): float(row[measure])
        for row in seed
        if row.get(across) is not None and row.get(measure) is not None and np.isfinite(row[measure])
    }
    return np.array(sorted(pairs)), np.array([pairs[x] for x in sorted(pairs)])


def _has(points: Sequence[Point], key: str) -> bool:
    return any(row.get(key) is not None for point in points for seed in point.curves for row in seed)


def _final(point: Point, measure: str) -> float:
    """Return the mean over seeds of the last validation."""
    lasts = [y[-1] for seed in point.curves if len(y := _line(seed, "update", measure)[1])]
    return float(np.mean(lasts)) if lasts else float("nan")


def _any_tails(grid: Sequence[Any]) -> bool:
    return any(str(line.get_gid()).startswith("tail ") for axes in grid for line in axes.get_lines())
