"""Points with chosen numbers, and what a figure shows."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mtkit.attention import mechanisms
from mtkit.experiments.pictures.costs import COSTS
from mtkit.experiments.pictures.points import Point


def point(name: str, *values: float, family: str | None = "sparse", **changed: Any) -> Point:
    mean = sum(values) / max(len(values), 1)
    default = {"low": mean - 1.5, "high": mean + 1.25, "costs": {key: 100.0 for key in COSTS}}
    return Point(name, family, values, **{**default, **changed})


def many(count: int, seeds: int = 3, **changed: Any) -> list[Point]:
    """Points of all mechanisms, and of others, with different costs and learning curves; the first is "full"."""
    draw = random.Random(count)
    families = {"full": "scoring"} | {name: each.family for name, each in mechanisms().items()}
    families |= {f"band[window_radius={radius}]": "sparse" for radius in range(count)}
    points = []
    for name, family in list(families.items())[:count]:
        best = draw.uniform(60, 97)
        values = [best + draw.uniform(-1, 1) for _ in range(seeds)]
        costs = {key: draw.lognormvariate(9, 0.8) for key in COSTS}
        curves = [curve([value - 50 / update for update in range(1, 6)]) for value in values]
        points.append(point(name, *values, family=family, **{"costs": costs, "curves": curves, **changed}))
    return points


def curve(values: Sequence[float], measure: str = "bleu", every: int = 100) -> list[Mapping[str, float]]:
    """A validation each `every` updates."""
    return [
        {"update": update, "tokens": 10 * update, "seconds": update / 50, "flops": 1e9 * update, measure: value}
        for update, value in ((every * number, value) for number, value in enumerate(values, start=1))
    ]


def drawn(figure: Any, gid: str) -> list[Any]:
    """The lines and texts with this name."""
    return [each for axes in figure.axes for each in [*axes.get_lines(), *axes.texts] if each.get_gid() == gid]


def words(figure: Any) -> str:
    """All text in a figure: title, note, axes and legends."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))
