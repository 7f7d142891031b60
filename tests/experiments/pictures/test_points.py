import math

import numpy as np
import pytest

from mtkit.experiments.pictures.points import Point, is_wide, listed, omissions, scale_of, scored, to_label
from tests.experiments.pictures.points import point


def test_mean_deviation_and_interval() -> None:
    three = point("a", 1.0, 2.0, 6.0, low=0.5, high=7.0)
    assert three.mean == 3
    assert three.deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert three.interval == (0.5, 7.0)
    assert point("a", 2.0).deviation == 0
    assert Point("a", None, (2.0,)).interval == (2.0, 2.0)
    assert point("a", 2.0, low=2.5, high=math.nan).interval == (2.0, 2.0)


def test_costs_that_were_not_measured() -> None:
    costs = point("a", 1.0, costs={"flops": None, "minutes": math.nan, "memory": 0.0})
    assert [costs.cost(key) for key in ("flops", "minutes", "memory", "state")] == [None, None, 0.0, None]


def test_failed_trials_are_left_out_and_named() -> None:
    points = [point("full", 1.0, 2.0), point("band", failed=3), point("luna", 1.0, failed=2), point("nan", math.nan)]
    assert [each.name for each in scored(points)] == ["full", "luna"]
    assert omissions(points) == "Left out: band, nan (no score); 2 failed trials of luna."
    assert omissions(points[:1]) == ""
    assert omissions([point("a", 1.0, failed=1)]) == "Left out: 1 failed trial of a."


def test_long_lists_are_cut() -> None:
    assert listed("abcdefg") == "a, b, c, d, e, f, g"
    assert listed("abcdefgh") == "a, b, c, d, e, f and 2 others"


@pytest.mark.parametrize(
    ("metric", "values", "kind", "lower"),
    [
        ("BLEU", [20.0, 30.0], "linear", False),
        ("BLEU", [5.0, 90.0, 97.0], "distance", False),
        ("exact", [100.0, 100.0, 0.0], "distance", False),
        ("chrF", [], "linear", False),
        ("TER", [90.0, 95.0], "linear", True),
        ("loss", [1.0, 2.0], "linear", True),
        ("loss", [0.1, 2.0], "log", True),
        ("loss", [0.0, 2.0], "linear", True),
        ("COMET", [0.8, 0.9], "linear", False),
    ],
)
def test_the_scale_follows_from_metric_and_values(metric: str, values: list[float], kind: str, lower: bool) -> None:
    scale = scale_of(metric, values)
    assert (scale.kind, scale.lower) == (kind, lower)


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize(
    ("metric", "values"),
    [("BLEU", [20.0, 40.0]), ("BLEU", [3.0, 95.0, 100.0]), ("TER", [9.0, 40.0]), ("loss", [0.1, 9.0])],
)
def test_better_values_are_right_or_above_and_inside(metric: str, values: list[float], axis: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot(values, values)
    scale = scale_of(metric, values)
    scale.apply(axes, axis)
    places = axes.transData.transform([(value, value) for value in sorted(values, reverse=scale.lower)])
    places = places[:, "xy".index(axis)]
    assert np.all(np.diff(places) > 0)
    start, end = getattr(axes, f"get_{axis}lim")()
    assert min(start, end) <= min(values)
    assert max(values) <= max(start, end)


def test_ticks_of_scores_do_not_crowd() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0.0, 100.0, 101.9], [0.0, 1.0, 2.0])  # an interval may go beyond 100
    scale_of("BLEU", [0.0, 100.0, 100.0]).apply(axes, "x")
    ticks = axes.get_xticks()
    low, high = axes.transAxes.transform([(0, 0), (1, 1)])[:, 0]
    places = axes.transData.transform([(tick, 0) for tick in sorted(ticks)])[:, 0]
    assert len(ticks) > 5
    assert np.diff(places).min() >= 0.044 * (high - low)
    assert high - axes.transData.transform((100, 0))[0] < 0.1 * (high - low), "no empty room above 100"


def test_labels_of_near_ticks_differ() -> None:
    assert [to_label(tick) for tick in (269.1e9, 269.15e9, 269.2e9, 1e6)] == ["269.1G", "269.15G", "269.2G", "1M"]


def test_wide_values_differ_by_a_factor_of_ten() -> None:
    assert is_wide([1.0, 10.0])
    assert not is_wide([1.0, 9.9])
    assert not is_wide([0.0, 9.9])
    assert not is_wide([])
