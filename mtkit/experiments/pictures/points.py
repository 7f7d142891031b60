"""Input for a study's pictures: entries with their quality, costs and learning curves, and the quality's scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np

from mtkit.experiments.pictures.canvas import shortened
from mtkit.terminal import short

PERCENT = ("BLEU", "chrF", "exact", "token")
"""Metrics from 0 to 100, higher is better."""
LOWER = ("TER", "loss")
"""Metrics whose lower values are better. The other metrics are better when higher."""
NAMES = {"exact": "exact match", "token": "token match"}
TITLES = {"loss": "loss in nats per target token"}
"""Names of metrics in text, and titles of their axes, if they differ."""
BEST = 102.0
"""Score at which the height of the logarithmic scale would be infinite."""
CROWDED = 80.0
"""Median score of a percent metric above which its scale is logarithmic in the distance to `BEST`."""
WIDE = 10.0
"""Ratio of the largest to the smallest value from which a scale is logarithmic."""
TICKS = (100, 99, 98, 95, 90, 85, 80, 75, 70, 60, 50, 40, 20, 0)
"""Ticks of the logarithmic scale of scores. If at most 3 of them are visible, matplotlib chooses the ticks."""
TOP = 100.6
"""Largest end of that scale: the room between 100 and `BEST` is empty."""
APART = 0.045
"""Smallest distance between two ticks, as a share of the axis, at which their labels do not overlap."""


@dataclass(frozen=True)
class Point:
    """An entry of a study on one task, with the measurements of its trials that did not fail."""

    name: str
    """Name as in the table: "band[window_radius=16]"."""
    family: str | None
    """Family of its mechanism; None if it has several families or none."""
    values: tuple[float, ...]
    """Quality of each seed; empty if all trials failed."""
    low: float | None = None
    """Lower end of the quality's 95% interval; None if there is none."""
    high: float | None = None
    costs: Mapping[str, float | None] = field(default_factory=dict)
    """Mean over seeds of each cost, by its key in `costs.COSTS`; costs that were not measured are missing or None."""
    curves: Sequence[Sequence[Mapping[str, Any]]] = ()
    """Per seed, its validations: "update", "tokens", "seconds", "flops" and the scores "nll", "bleu", ..."""
    failed: int = 0
    """Number of failed trials."""

    @property
    def mean(self) -> float:
        """Mean quality over seeds."""
        return fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of the quality over seeds; 0 for one seed."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval, which includes the mean: the mean twice if there is no interval."""
        low, high = (end if end is not None and math.isfinite(end) else self.mean for end in (self.low, self.high))
        return min(low, self.mean), max(high, self.mean)

    def cost(self, key: str) -> float | None:
        """Return a cost; None if it was not measured."""
        cost = self.costs.get(key)
        return cost if cost is not None and math.isfinite(cost) else None


def scored(points: Sequence[Point]) -> list[Point]:
    """Return the entries with at least one trial that did not fail, all with finite quality."""
    return [point for point in points if point.values and all(map(math.isfinite, point.values))]


def omissions(points: Sequence[Point]) -> str:
    """Return which entries and trials the pictures leave out, as text for readers; empty if there are none."""
    drawn = scored(points)
    gone = [point.name for point in points if point not in drawn]
    partly = [point.name for point in drawn if point.failed]
    lines = [f"{listed(gone)} (no score)"] if gone else []
    if partly:
        count = sum(point.failed for point in drawn)
        lines.append(f"{count} failed trial{'s' * (count > 1)} of {listed(partly)}")
    return f"Left out: {'; '.join(lines)}." if lines else ""


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as a list for readers, with at most `most` names."""
    rest = len(names) - most
    names = list(shortened(names).values())
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:most])} and {rest} others"


class Scale(NamedTuple):
    """The axis of a metric: the metric's name, the axis title, its direction and its kind."""

    name: str
    title: str
    lower: bool
    """Whether lower values are better."""
    kind: str
    """ "linear", "log", or "distance": logarithmic in the distance to `BEST`."""

    def apply(self, axes: Any, axis: str) -> None:
        """Set the scale of the "x" or "y" axis, with better values to the right or on top; data are drawn already."""
        if self.kind == "distance":
            functions = (_height, lambda height: BEST - np.exp(-height))
            getattr(axes, f"set_{axis}scale")("function", functions=functions)
            low, high = getattr(axes, f"get_{axis}lim")()
            high = min(high, TOP)
            getattr(axes, f"set_{axis}lim")(low, high)
            if len(ticks := _ticks(low, high)) > 3:
                getattr(axes, f"set_{axis}ticks")(ticks)
        elif self.kind == "log":
            logarithmic(axes, axis)
        if self.lower:
            getattr(axes, f"invert_{axis}axis")()


def scale_of(metric: str, values: Sequence[float]) -> Scale:
    """Return the scale of a metric that shows the differences between these values best."""
    if metric in PERCENT and values and median(values) > CROWDED:
        kind = "distance"
    else:  # low scores, unlike a low loss, are failures, whose distances do not matter
        kind = "log" if metric == "loss" and is_wide(values) else "linear"
    name = NAMES.get(metric, metric)
    return Scale(name, TITLES.get(metric, name), metric in LOWER, kind)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values are positive and differ by a factor of `WIDE`: their scale is logarithmic then."""
    return bool(values) and min(values) > 0 and max(values) >= WIDE * min(values)


def logarithmic(axes: Any, axis: str) -> None:
    """Make an axis logarithmic, with a label at 1, 2 and 5 of each decade, or only at 1 if there are many decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{axis}scale")("log")
    low, high = getattr(axes, f"get_{axis}lim")()
    line = getattr(axes, f"{axis}axis")
    line.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    line.set_major_formatter(to_label)
    line.set_minor_formatter(NullFormatter())


def to_label(value: float, _: int | None = None) -> str:
    """Return the label of a tick with all digits of its value, so that near ticks have different labels."""
    return short(value, digits=6)


def _ticks(low: float, high: float) -> list[float]:
    """Return the ticks between two scores that are far enough apart, from the largest."""
    bottom, top = (float(_height(np.array(end))) for end in (low, high))
    chosen: list[float] = []
    for tick in TICKS:
        height = float(_height(np.array(tick)))
        near = chosen and float(_height(np.array(chosen[-1]))) - height < APART * (top - bottom)
        if low < tick < high and not near:
            chosen.append(tick)
    return chosen


def _height(score: np.ndarray) -> np.ndarray:
    """Return the heights of scores (N,) on the logarithmic axis."""
    return -np.log(np.maximum(BEST - score, 1e-3))
