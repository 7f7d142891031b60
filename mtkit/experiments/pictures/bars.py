"""Quality of each entry with its 95% interval and seeds, and training speed: the first picture to look at."""

from collections.abc import Sequence
from typing import Any

from mtkit.experiments.pictures.canvas import FAINT, INK, entitle, new_figure, shortened
from mtkit.experiments.pictures.points import Point, omissions, scale_of, scored, to_label
from mtkit.terminal import short

COLOR = "#0072b2"
TALL = 30
"""Number of entries above which the axis has its numbers at the top too."""
ROOM = 0.18
"""Share of the speed axis to the right of the longest bar, for its number."""


def draw_bars(points: Sequence[Point], metric: str, title: str) -> Any:
    """Return a figure with a row per entry, the best on top and the first entry in a dark colour; None without entries.

    The quality axis does not begin at 0, which would hide differences, so quality is drawn as dots and not as bars.
    """
    entries = scored(points)
    if not entries:
        return None
    scale = scale_of(metric, [point.mean for point in entries])
    entries.sort(key=lambda point: point.mean if scale.lower else -point.mean)
    speeds = [point.cost("training-speed") or 0.0 for point in entries]
    figure = new_figure(12, 1.5 + 0.27 * max(len(entries), 2))
    panels = figure.subplots(
        1, 2 if any(speeds) else 1, sharey=True, squeeze=False, width_ratios=(3, 2)[: 1 + any(speeds)]
    )[0]
    _quality(panels[0], entries, points[0])
    scale.apply(panels[0], "x")
    panels[0].set_xlabel(f"{scale.title}  (better →)")
    panels[0].set_yticks(range(len(entries)), shortened(point.name for point in entries).values())
    panels[0].set_ylim(len(entries) - 0.4, -0.6)
    panels[0].tick_params(axis="y", length=0)
    if len(entries) > TALL:
        for axes in panels:
            axes.tick_params(axis="x", top=True, labeltop=True)
    if any(speeds):
        _speed(panels[1], entries, speeds, points[0])
    most = max(len(point.values) for point in entries)
    entitle(
        figure,
        f"{title}: {scale.name}",
        "Large dot: mean; line: 95% interval"
        + (
            "; small dots: seeds; ±: their standard deviation."
            if most > 1
            else " over test segments, which does not cover the variance between seeds."
        ),
        "Dotted line: first entry." if points[0] in entries else "",
        omissions(points),
    )
    return figure


def _quality(axes: Any, entries: Sequence[Point], first: Point) -> None:
    """Draw interval, seeds and mean of each entry, and its number at the right edge."""
    for row, point in enumerate(entries):
        color = INK if point is first else COLOR
        axes.plot(point.interval, [row, row], color=color, linewidth=1.6, alpha=0.6, gid=f"interval {point.name}")
        if len(point.values) > 1:
            axes.plot(
                point.values,
                [row] * len(point.values),
                "o",
                color=color,
                markersize=3,
                alpha=0.45,
                gid=f"seeds {point.name}",
            )
        axes.plot([point.mean], [row], "o", color=color, markersize=6.5, gid=point.name)
        number = f"{point.mean:.2f}" + (f" ± {point.deviation:.2f}" if len(point.values) > 1 else "")
        axes.annotate(
            number, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            verticalalignment="center", fontsize=8, color=color, annotation_clip=False,
        )  # fmt: skip
    if first in entries:
        axes.axvline(first.mean, color=INK, linewidth=0.8, linestyle=":", zorder=1, gid="first")


def _speed(axes: Any, entries: Sequence[Point], speeds: Sequence[float], first: Point) -> None:
    """Draw a bar per entry with its number; an entry without a speed has none."""
    colors = [INK if point is first else FAINT for point in entries]
    axes.barh(range(len(entries)), speeds, color=colors, alpha=0.75, height=0.6)
    for row, speed in enumerate(speeds):
        text = short(speed) if speed else "not measured"
        axes.annotate(
            text, (speed, row), xytext=(4, 0), textcoords="offset points", verticalalignment="center", fontsize=8
        )
    axes.set_xlim(0, max(speeds) * (1 + ROOM))
    axes.set_xlabel("training speed, target tokens/s")
    axes.xaxis.set_major_formatter(to_label)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
