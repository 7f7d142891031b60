"""Quality against a cost: a dot with its 95% interval per entry, coloured by family, and the Pareto front."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mtkit.experiments.pictures.canvas import DPI, FAINT, INK, MIXED, STYLES, entitle, new_figure, shortened, style_of
from mtkit.experiments.pictures.labels import Box, label_places
from mtkit.experiments.pictures.points import Point, is_wide, listed, logarithmic, omissions, scale_of, scored, to_label
from mtkit.memory import in_words

DOT = 4.5
"""Radius of a dot in points."""
FEW = 24
"""Number of entries up to which every entry has a label. Of more, only the most important have one."""
RINGS_OF_OTHERS = 2
"""Distances that are tried for a label that may be left out."""


class Cost(NamedTuple):
    """A cost: its name in titles, and its axis title."""

    name: str
    title: str
    faster: bool = False
    """Whether higher is better, as of a speed."""
    bytes: bool = False


COSTS = {
    "flops": Cost("training FLOPs", "training FLOPs per target token"),
    "training-speed": Cost("training speed", "training speed, target tokens/s", faster=True),
    "decoding-speed": Cost("decoding speed", "decoding speed, target tokens/s", faster=True),
    "parameters": Cost("parameters", "parameters"),
    "memory": Cost("peak memory", "peak memory of training", bytes=True),
    "state": Cost("decoding state", "decoding state per hypothesis after 1,000 target tokens", bytes=True),
    "minutes": Cost("time", "time per trial, minutes"),
}
"""The costs by their key in `Point.costs`."""


def draw_cost(points: Sequence[Point], key: str, metric: str, title: str, cost: Cost | None = None) -> Any:
    """Return a figure of the entries that have this cost, by default COSTS[key]; None if no entry has it.

    Of more than `FEW` entries, the front, the first entry and the best and worst of each axis have a label, and others
    if there is room next to their dot.
    """
    shown = [point for point in scored(points) if point.cost(key) is not None]
    if not shown:
        return None
    cost, scale = cost or COSTS[key], scale_of(metric, [point.mean for point in scored(points)])
    costs = [point.cost(key) or 0.0 for point in shown]
    values = [point.mean for point in shown]
    best = pareto_front(costs, values, faster=cost.faster, lower=scale.lower)
    figure = new_figure(11, 7.6)
    axes = figure.subplots()
    for point, x in zip(shown, costs, strict=True):
        _dot(axes, point, x, first=point is points[0])
    axes.margins(0.09)
    if is_wide(costs):
        logarithmic(axes, "x")
    if cost.bytes:
        _byte_ticks(axes, costs)
    elif not is_wide(costs):
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}" if abs(value) < 10_000 else to_label(value))
    scale.apply(axes, "y")
    axes.set_xlabel(f"{cost.title}  ({'better →' if cost.faster else '← better'})")
    axes.set_ylabel(f"{scale.title}  (better →)")
    missing = [point.name for point in scored(points) if point not in shown]
    entitle(
        figure,
        f"{title}: {scale.name} and {cost.name}",
        f"Vertical lines: 95% intervals of {scale.name}"
        + (", means over seeds." if any(len(point.values) > 1 for point in shown) else ".")
        + (" Ring: first entry." if points[0] in shown else ""),
        "Pareto front: entries for which no other entry is better in one and at least as good in the other.",
        f"{cost.name.capitalize()} not measured: {listed(missing)}." if missing else "",
        omissions(points),
    )
    _legend(figure, shown)
    figure.draw_without_rendering()  # fixes the layout, so that pixel positions are final
    figure.set_layout_engine("none")
    front = _front(axes, costs, values, best, faster=cost.faster)
    places = list(zip(costs, values, strict=True))
    first = {index for index, point in enumerate(shown) if point is points[0]}
    ends = {choose(range(len(shown)), key=numbers.__getitem__) for numbers in (costs, values) for choose in (min, max)}
    _label(axes, shown, places, front, set(range(len(shown))) if len(shown) <= FEW else {*best, *first, *ends})
    return figure


def pareto_front(costs: Sequence[float], values: Sequence[float], *, faster: bool, lower: bool) -> list[int]:
    """Return the indices of the entries that no other entry dominates, by increasing cost.

    An entry dominates another if it is at least as good in both and better in one. `faster` is true if a higher cost is
    better, as of a speed; `lower` if lower quality is better, as of a loss.
    """
    keys = [(-cost if faster else cost, value if lower else -value) for cost, value in zip(costs, values, strict=True)]
    front: list[int] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        if not front or keys[index][1] < keys[front[-1]][1] or keys[index] == keys[front[-1]]:
            front.append(index)
    return sorted(front, key=costs.__getitem__)


def steps(
    places: Sequence[tuple[float, float]], left: float, right: float, worst: float, *, faster: bool
) -> list[tuple[float, float]]:
    """Return the corners of the front's line: at each cost, the best quality of entries that cost no more.

    The entries (cost, quality) are sorted by cost. The line begins and ends at the edges of the picture.
    """
    line: list[tuple[float, float]] = []
    ordered = [(-x, y) for x, y in reversed(places)] if faster else list(places)
    previous = worst
    for x, y in ordered:
        line += [(x, previous), (x, y)]
        previous = y
    line.append((-left if faster else right, previous))
    return [(-x, y) for x, y in line] if faster else line


def _byte_ticks(axes: Any, costs: Sequence[float]) -> None:
    """Label the x axis in KiB, MiB or GiB, at powers of two if it is logarithmic."""
    from matplotlib.ticker import LogLocator, MultipleLocator

    if is_wide(costs):
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_minor_locator(LogLocator(base=2))
    else:
        low, high = axes.get_xlim()
        step = 2.0 ** math.ceil(math.log2((high - low) / 8))  # 4 to 8 ticks
        axes.xaxis.set_major_locator(MultipleLocator(step))
    # near ticks have different labels
    axes.xaxis.set_major_formatter(lambda value, _: in_words(round(value), digits=6))


def _dot(axes: Any, point: Point, x: float, *, first: bool) -> None:
    """Draw an entry and its interval."""
    color, marker = style_of(point.family)
    low, high = point.interval
    axes.plot([x, x], [low, high], color=INK if first else FAINT, linewidth=1, alpha=0.5, zorder=2)
    axes.plot(
        [x], [point.mean], marker, color=color, markersize=2 * DOT, markeredgecolor="#555555",
        markeredgewidth=0.5, zorder=3, gid=point.name,
    )  # fmt: skip
    if first:
        axes.plot(
            [x], [point.mean], "o", markersize=3.4 * DOT, markerfacecolor="none", color=INK, zorder=6, gid="first"
        )


def _legend(figure: Any, points: Sequence[Point]) -> None:
    """Write the families and the front to the right of the axes, because a dot may be anywhere inside."""
    from matplotlib.lines import Line2D

    styles = {style_of(point.family) for point in points}
    handles = [
        Line2D([], [], linestyle="", color=color, marker=marker, markeredgecolor="#555555", markeredgewidth=0.5,
               markersize=2 * DOT, label=MIXED if family == MIXED else family)
        for family, (color, marker) in STYLES.items()
        if (color, marker) in styles
    ]  # fmt: skip
    front = Line2D([], [], color=INK, linewidth=1.2, label="Pareto front")
    figure.legend(handles=[*handles, front], loc="outside right upper", title="family")


def _front(
    axes: Any, costs: Sequence[float], values: Sequence[float], best: Sequence[int], *, faster: bool
) -> list[tuple[float, float]]:
    """Draw the front up to the edges of the axes; return its corners."""
    left, right = axes.get_xlim()
    worst = axes.get_ylim()[0]
    line = steps([(costs[index], values[index]) for index in best], left, right, worst, faster=faster)
    axes.plot(*zip(*line, strict=True), color=INK, linewidth=1.2, zorder=1, scalex=False, scaley=False, gid="front")
    return line


def _label(
    axes: Any,
    points: Sequence[Point],
    places: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float]],
    chosen: set[int],
) -> None:
    """Write the names of the chosen entries, with a line to a distant dot, and of others if there is room."""
    from matplotlib.patheffects import withStroke

    names = shortened(point.name for point in points)
    texts = {
        index: axes.text(
            0, 0, names[point.name], fontsize=8 if index in chosen else 6.5, verticalalignment="bottom",
            color=INK if index in chosen else "#666666", gid=f"label {point.name}",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],  # readable on lines
        )
        for index, point in enumerate(points)
    }  # fmt: skip
    dots = [(float(x), float(y)) for x, y in axes.transData.transform(places)]
    sizes = {index: (box.width, box.height) for index, box in ((i, t.get_window_extent()) for i, t in texts.items())}
    window = axes.get_window_extent()
    frame = Box(window.x0, window.y0, window.width, window.height)
    radius = DOT * DPI / 72
    lines = [
        *pairwise(front),
        *(((x, point.interval[0]), (x, point.interval[1])) for point, (x, _) in zip(points, places, strict=True)),
    ]
    avoided = [Box.around(axes.transData.transform(line)) for line in lines]
    placed = label_places(dots, {index: sizes[index] for index in chosen}, frame, radius, avoided=avoided)
    others = {index: size for index, size in sizes.items() if index not in chosen}
    placed |= label_places(dots, others, frame, radius, taken=placed.values(), avoided=avoided, rings=RINGS_OF_OTHERS)
    back = axes.transData.inverted()
    for index, text in texts.items():
        if index not in placed:
            text.remove()
            continue
        box = placed[index]
        text.set_position(back.transform((box.left, box.bottom)))
        line = back.transform([dots[index], box.nearest(*dots[index])])
        axes.plot(line[:, 0], line[:, 1], color=FAINT, linewidth=0.6, zorder=1, scalex=False, scaley=False)
