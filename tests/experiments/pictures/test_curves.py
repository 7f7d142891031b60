import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from mtkit.experiments.pictures.curves import DEVIATIONS, MOST, curve_of, draw_curves
from tests.experiments.pictures.points import curve, drawn, many, point, words

pytest.importorskip("matplotlib")


def test_seeds_at_different_updates_are_interpolated() -> None:
    seeds = [curve([10.0, 20.0, 30.0], every=100), curve([0.0, 8.0], every=150)]
    result = curve_of(seeds, "update", "bleu")
    assert result is not None
    assert result.x.tolist() == [150, 200, 300]
    assert result.mean == pytest.approx([(15 + 0) / 2, (20 + 8 / 3) / 2, (30 + 8) / 2])
    assert result.low == pytest.approx([0, 8 / 3, 8])
    assert result.high == pytest.approx([15, 20, 30])
    assert result.tails == []


def test_the_band_of_many_seeds_is_their_standard_deviation() -> None:
    finals = [float(number**2) for number in range(5)]
    result = curve_of([curve([0.0, final]) for final in finals], "tokens", "bleu", deviation=True)
    assert result is not None
    assert result.mean[-1] == pytest.approx(statistics.fmean(finals))
    assert result.high[-1] - result.mean[-1] == pytest.approx(statistics.stdev(finals))
    assert result.mean[-1] - result.low[-1] == pytest.approx(statistics.stdev(finals))


def test_one_seed_has_no_band() -> None:
    result = curve_of([curve([1.0, 2.0])], "update", "bleu", deviation=True)
    assert result is not None
    assert result.low.tolist() == result.mean.tolist() == result.high.tolist() == [1, 2]


@pytest.mark.parametrize(("seeds", "band"), [(DEVIATIONS - 1, "range of 4"), (DEVIATIONS, "standard deviation of 5")])
def test_all_entries_of_a_study_have_the_same_kind_of_band(seeds: int, band: str) -> None:
    full, other = many(2, seeds)
    figure = draw_curves([full, replace(other, values=other.values[:2], curves=other.curves[:2])], "BLEU", "A study")
    assert f"mean and {band} seeds" in words(figure)
    finals = [rows[-1]["bleu"] for rows in other.curves[:2]]
    expected = 2 * statistics.stdev(finals) if seeds == DEVIATIONS else max(finals) - min(finals)
    heights = [
        float(np.ptp(vertices[np.isclose(vertices[:, 0], 500), 1]))
        for vertices in (path.vertices for band in figure.axes[0].collections for path in band.get_paths())
    ]
    assert min(abs(height - expected) for height in heights) < 1e-9


def test_an_entry_whose_name_begins_with_an_underscore_is_in_the_legend() -> None:
    figure = draw_curves([replace(each, name=f"_{each.name}") for each in many(2)], "BLEU", "A study")
    assert "_full (first entry)" in words(figure)


def test_longer_seeds_continue_alone() -> None:
    result = curve_of([curve([1.0, 2.0]), curve([3.0, 4.0, 5.0, 6.0])], "update", "bleu")
    assert result is not None
    assert result.x.tolist() == [100, 200]
    ((x, y),) = result.tails
    assert (x.tolist(), y.tolist()) == ([200, 300, 400], [4, 5, 6])


def test_missing_and_infinite_numbers_are_left_out() -> None:
    rows = [*curve([1.0, math.nan]), {"update": 300, "bleu": None}, {"update": 400, "bleu": 2.0}, {"update": 350}]
    result = curve_of([rows, [], [{"update": 100}]], "update", "bleu")
    assert result is not None
    assert result.x.tolist() == [100, 400]
    assert curve_of([[], rows], "seconds", "chrf") is None


def test_seeds_without_a_common_range() -> None:
    result = curve_of([curve([1.0]), curve([2.0], every=300)], "update", "bleu")
    assert result is not None
    assert len(result.x) == len(result.mean) == 0
    assert [(x.tolist(), y.tolist()) for x, y in result.tails] == [([100], [1]), ([300], [2])]
    figure = draw_curves([point("full", 3.0, curves=[curve([1.0]), curve([2.0], every=300)])], "BLEU", "A study")
    for axes in figure.axes:
        dots = [line for line in axes.get_lines() if line.get_gid() == "tail full"]
        assert [list(line.get_ydata()) for line in dots] == [[1.0], [2.0]]
        assert all(line.get_marker() == "." for line in dots)


def test_four_panels_of_the_metric_with_the_best_first_in_the_legend() -> None:
    points = [
        point("full", 3.0, curves=[curve([1.0, 3.0]), curve([1.0, 4.0])]),
        point("band", 9.0, curves=[curve([5.0, 9.0])]),
        point("gone", failed=1, curves=[curve([9.0])]),
        point("none", 2.0),
    ]
    figure = draw_curves(points, "BLEU", "A study")
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "updates", "target tokens", "training time, seconds", "training FLOPs",
    ]  # fmt: skip
    for axes, line in zip(figure.axes, drawn(figure, "full"), strict=True):
        assert list(line.get_ydata()) == [1.0, 3.5]
        assert line in axes.get_lines()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["band", "full (first entry)"]
    assert "A study: validation BLEU, mean and range of 2 seeds" in words(figure)
    assert "Left out: gone (no score)." in words(figure)
    assert len(figure.axes[0].collections) == 2, "a band per entry"


def test_the_loss_is_drawn_if_validations_lack_the_metric() -> None:
    points = [point("full", 50.0, curves=[curve([4.0, 2.0], "nll")]), point("band", 40.0, curves=[curve([3.0], "nll")])]
    figure = draw_curves(points, "chrF", "A study")
    assert "validation loss" in words(figure)
    low, high = figure.axes[0].get_ylim()
    assert low > high
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full (first entry)", "band"]


@pytest.mark.parametrize(("metric", "key"), [("exact", "exact"), ("chrF", "chrf"), ("TER", "ter"), ("loss", "nll")])
def test_the_curve_of_each_metric(metric: str, key: str) -> None:
    rows = [{**row, key: 7.0, "nll": 7.0 if key == "nll" else 1.0} for row in curve([1.0, 2.0])]
    figure = draw_curves([point("full", 7.0, curves=[rows])], metric, "A study")
    assert list(drawn(figure, "full")[0].get_ydata()) == [7.0, 7.0]


def test_panels_that_nothing_was_measured_for_are_left_out() -> None:
    rows = [{"update": 1, "bleu": 3.0, "seconds": 2.0, "flops": None}]
    figure = draw_curves([point("full", 3.0, curves=[rows])], "BLEU", "A study")
    assert [axes.get_xlabel() for axes in figure.axes] == ["updates", "training time, seconds"]
    assert draw_curves([point("full", 3.0)], "BLEU", "A study") is None
    assert draw_curves([point("full", 3.0, curves=[curve([math.nan])])], "BLEU", "A study") is None
    assert draw_curves([point("full", 3.0, curves=[[{"update": 1}]])], "BLEU", "A study") is None


def test_of_many_entries_the_best_and_the_first_are_in_colour() -> None:
    points = many(79)
    worst = min(range(79), key=lambda index: points[index].mean)
    points[0], points[worst] = points[worst], points[0]
    figure = draw_curves(points, "BLEU", "A study")
    lines = {each.name: drawn(figure, each.name)[0] for each in points}
    wide = {name for name, line in lines.items() if line.get_linewidth() > 1}
    best = sorted(points, key=lambda each: -each.mean)[:MOST]
    assert wide == {each.name for each in [*best, points[0]]}
    assert len({lines[name].get_color() for name in wide}) == MOST + 1
    assert "in grey: 70 more" in words(figure)
    assert np.isfinite(figure.axes[0].get_ylim()).all()
