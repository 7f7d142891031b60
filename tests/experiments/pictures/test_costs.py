import math
import random
from itertools import combinations, pairwise

import pytest

from mtkit.experiments.pictures.canvas import style_of
from mtkit.experiments.pictures.costs import COSTS, draw_cost, pareto_front, steps
from mtkit.experiments.pictures.points import Point
from tests.experiments.pictures.points import drawn, many, point, words

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_no_entry_dominates(seed: int, faster: bool, lower: bool) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 30)
    costs, values = ([float(draw.randint(0, 9)) for _ in range(count)] for _ in range(2))  # with ties

    def gains(one: int, other: int) -> tuple[float, float]:
        cost, value = costs[other] - costs[one], values[one] - values[other]
        return (-cost if faster else cost), (-value if lower else value)

    def dominated(index: int) -> bool:
        return any(min(pair) >= 0 < max(pair) for pair in (gains(other, index) for other in range(count)))

    front = pareto_front(costs, values, faster=faster, lower=lower)
    assert sorted(front) == [index for index in range(count) if not dominated(index)]
    assert [costs[index] for index in front] == sorted(costs[index] for index in front)


@pytest.mark.parametrize("faster", [True, False])
def test_the_line_shows_the_best_quality_at_each_cost(faster: bool) -> None:
    draw = random.Random(1)
    costs, values = ([draw.uniform(1, 9) for _ in range(20)] for _ in range(2))
    front = pareto_front(costs, values, faster=faster, lower=False)
    line = steps([(costs[index], values[index]) for index in front], 0.0, 10.0, 0.0, faster=faster)
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairwise(line))
    assert line[-1][0] == (0.0 if faster else 10.0)
    for cost in (draw.uniform(0, 10) for _ in range(50)):
        best = max((v for c, v in zip(costs, values, strict=True) if (c >= cost if faster else c <= cost)), default=0.0)
        across = [y for (a, y), (b, _) in pairwise(line) if min(a, b) < cost < max(a, b)]
        assert (across or [0.0]) == [best]


def test_a_dot_and_an_interval_per_entry() -> None:
    points = [
        point("full", 30.0, 32.0, family="scoring", low=29.0, high=34.0, costs={"minutes": 2.0}),
        point("band", 28.0, costs={"minutes": 1.0}),
        point("zero", 28.0, low=28.0, high=28.0, costs={"minutes": 1.0}),
        point("gone", failed=2, costs={"minutes": 9.0}),
        point("other", 30.0, costs={}),
    ]
    figure = draw_cost(points, "minutes", "BLEU", "A study")
    (full,) = drawn(figure, "full")
    assert (list(full.get_xdata()), list(full.get_ydata())) == ([2.0], [31.0])
    assert full.get_color() == style_of("scoring")[0]
    assert [29.0, 34.0] in [list(line.get_ydata()) for line in figure.axes[0].get_lines()]
    assert not drawn(figure, "gone")
    assert not drawn(figure, "other")
    assert "Time not measured: other." in " ".join(words(figure).split())
    assert "Left out: gone (no score)." in " ".join(words(figure).split())
    assert "A study: BLEU and time" in words(figure)
    assert [text.get_text() for name in ("full", "band", "zero") for text in drawn(figure, f"label {name}")] == [
        "full", "band", "zero",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 8, 79])
@pytest.mark.parametrize("key", ["decoding-speed", "state"])
def test_no_label_overlaps_another_or_a_dot(count: int, key: str) -> None:
    points = many(count)
    figure = draw_cost(points, key, "BLEU", "A study")
    labels = {each.name: text for each in points for text in drawn(figure, f"label {each.name}")}
    boxes = [text.get_window_extent().shrunk(0.99, 0.9) for text in labels.values()]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    axes = figure.axes[0]
    dots = axes.transData.transform([(each.cost(key), each.mean) for each in points])
    assert not [(box, dot) for box in boxes for dot in dots if box.contains(*dot)]
    assert all(axes.get_window_extent().contains(*corner) for box in boxes for corner in (box.p0, box.p1))
    front = pareto_front(
        [each.cost(key) or 0 for each in points],
        [each.mean for each in points],
        faster=COSTS[key].faster,
        lower=False,
    )
    assert {points[index].name for index in front} | {"full"} <= set(labels)
    assert len(labels) == count or count > 24


@pytest.mark.parametrize("key", COSTS)
def test_better_quality_is_above_for_a_loss_too(key: str) -> None:
    figure = draw_cost([point("full", 2.0), point("band", 1.0)], key, "loss", "A study")
    low, high = figure.axes[0].get_ylim()
    assert low > high
    assert ("better →)" if COSTS[key].faster else "(← better)") in figure.axes[0].get_xlabel()


@pytest.mark.parametrize(("most", "scale"), [(150.0, "linear"), (5000.0, "log")])
def test_wide_costs_have_a_logarithmic_axis(most: float, scale: str) -> None:
    points = [point("full", 2.0), point("band", 1.0, costs={key: most for key in COSTS})]
    for key in COSTS:
        assert draw_cost(points, key, "BLEU", "A study").axes[0].get_xscale() == scale


def test_bytes_are_counted_in_powers_of_two() -> None:
    points = [point("full", 2.0, costs={"memory": 3 * 2.0**28}), point("band", 1.0, costs={"memory": 2.0**29})]
    figure = draw_cost(points, "memory", "BLEU", "A study")
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert "512 MiB" in labels
    assert len(labels) < 12


def test_near_numbers_of_bytes_have_different_ticks() -> None:
    points = [point(str(number), 2.0, costs={"memory": 1070460928.0 + 1e6 * number}) for number in range(9)]
    labels = [text.get_text() for text in draw_cost(points, "memory", "BLEU", "A study").axes[0].get_xticklabels()]
    assert len(set(labels)) == len(labels) > 3


def test_without_the_cost_there_is_no_picture() -> None:
    assert draw_cost([point("full", 2.0, costs={"flops": None})], "flops", "BLEU", "A study") is None
    assert draw_cost([point("full", failed=1)], "flops", "BLEU", "A study") is None


def test_the_first_entry_may_have_failed() -> None:
    figure = draw_cost([point("full", failed=1), point("band", 2.0)], "flops", "BLEU", "A study")
    assert not drawn(figure, "first")
    assert len(drawn(draw_cost([point("band", 2.0)], "flops", "BLEU", "A study"), "first")) == 1


def test_a_point_without_an_interval() -> None:
    figure = draw_cost([Point("full", None, (3.0,), costs={"flops": 0.0})], "flops", "COMET", "A study")
    (dot,) = drawn(figure, "full")
    assert list(dot.get_ydata()) == [3.0]
    assert not math.isnan(figure.axes[0].get_ylim()[0])
