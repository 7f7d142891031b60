import random
from dataclasses import replace
from itertools import combinations

import pytest

from mtkit.evaluation.ranks import rank
from mtkit.experiments.pictures.canvas import INK
from mtkit.experiments.pictures.ranks import FEW, Ranks, draw_ranks, lanes
from tests.experiments.pictures.points import drawn, words

pytest.importorskip("matplotlib")

NAMES = ["full", "band", "luna", "lazy"]
RANKS = Ranks(NAMES, [2.0, 1.25, 3.0, 3.75], 1.1, [[0, 1], [0, 2], [2, 3], [3]], 8, first="full")


def named(scores: list[list[float]]) -> Ranks:
    result = rank(scores)
    names = [f"entry-{number}" for number in range(len(scores[0]))]
    return Ranks(names, result.means, result.critical, result.groups, result.blocks, result.p)


def ranks_of(count: int, blocks: int = 6) -> Ranks:
    draw = random.Random(count)
    scores = [[entry / 4 + draw.gauss(0, 3) for entry in range(count)] for _ in range(blocks)]
    return named(scores)


def test_each_entry_is_joined_to_its_mean_rank() -> None:
    figure = draw_ranks(RANKS, "A study")
    for name, mean in zip(NAMES, RANKS.means, strict=True):
        (line,) = drawn(figure, name)
        assert (line.get_xdata()[0], line.get_ydata()[0]) == (mean, 0)
        (label,) = drawn(figure, f"label {name}")
        assert label.get_position() == (line.get_xdata()[-1], line.get_ydata()[-1])
        assert f"{mean:.2f}" in label.get_text()
    assert drawn(figure, "label band")[0].get_position()[0] < 1
    assert drawn(figure, "label lazy")[0].get_position()[0] > 4
    assert [name for name in NAMES if drawn(figure, f"label {name}")[0].get_fontweight() == "bold"] == ["full"]
    assert "A study: mean rank in 8 blocks" in words(figure)


def test_groups_have_bars_in_lanes_and_the_critical_difference_its_length() -> None:
    figure = draw_ranks(RANKS, "A study")
    bars = [(*line.get_xdata(), line.get_ydata()[0]) for line in drawn(figure, "group")]
    assert [bar[:2] for bar in bars] == [pytest.approx(span, abs=0.05) for span in [(1.25, 2), (2, 3), (3, 3.75)]]
    assert [bars[0][2] == bars[2][2], bars[0][2] == bars[1][2]] == [True, False]
    (ruler,) = drawn(figure, "difference")
    assert ruler.get_xdata()[1] - ruler.get_xdata()[0] == pytest.approx(1.1)


@pytest.mark.parametrize("count", [2, 3, 8, FEW, FEW + 1, 79])
def test_names_do_not_overlap(count: int) -> None:
    figure = draw_ranks(ranks_of(count), "A study")
    figure.canvas.draw()
    axes = figure.axes[0]
    texts = axes.get_yticklabels() if count > FEW else [text for text in axes.texts if text.get_gid()]
    assert len(texts) == count
    boxes = [text.get_window_extent() for text in texts]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.p0, box.p1))


def test_lines_of_a_long_list_overlap_if_ranks_differ_by_less_than_the_critical_difference() -> None:
    ranks = ranks_of(79, blocks=200)
    names = ranks.names
    figure = draw_ranks(ranks, "A study")
    lines = [drawn(figure, name)[0].get_xdata() for name in names]
    dark = {index for index, name in enumerate(names) if drawn(figure, name)[0].get_color() == INK}
    assert 1 < len(dark) < 78
    assert dark in [set(group) for group in ranks.groups]
    for one, other in combinations(range(79), 2):
        overlap = lines[one][0] <= lines[other][1] and lines[other][0] <= lines[one][1]
        assert overlap == (abs(ranks.means[one] - ranks.means[other]) < ranks.critical)
    assert figure.axes[0].get_xlim() == (0, 80)


def test_lanes_are_few_and_spans_in_a_lane_do_not_touch() -> None:
    draw = random.Random(5)
    spans = [(start, start + draw.randint(0, 4)) for start in (draw.randint(0, 30) for _ in range(40))]
    chosen = lanes(spans)
    for one, other in combinations(range(40), 2):
        if chosen[one] == chosen[other]:
            assert spans[one][1] < spans[other][0] or spans[other][1] < spans[one][0]
    assert max(chosen) + 1 == max(sum(low <= point <= high for low, high in spans) for point in range(40))
    assert lanes([]) == []


@pytest.mark.parametrize(("p", "text"), [(0.0123, "p = 0.012 "), (1e-9, "p < 0.001 "), (1.0, "p = 1.000 ")])
def test_the_note_has_the_test_of_all_entries(p: float, text: str) -> None:
    assert text in " ".join(words(draw_ranks(replace(RANKS, p=p), "A study")).split())


def test_ties_in_one_block() -> None:
    figure = draw_ranks(named([[1.0, 1.0]]), "A study")
    assert [drawn(figure, name)[0].get_xdata()[0] for name in ("entry-0", "entry-1")] == [1.5, 1.5]
    assert len(drawn(figure, "group")) == 1


def test_a_single_entry_has_no_ranks() -> None:
    assert draw_ranks(Ranks(["full"], [1.0], 0.0, [], 3), "A study") is None


def test_entries_without_ranks_are_named_and_the_first_may_be_one() -> None:
    figure = draw_ranks(replace(RANKS, first="gone", unranked=["gone", "lost"]), "A study")
    shown = " ".join(words(figure).split())
    assert "no score of them: gone, lost." in shown
    assert "Bold" not in shown
    assert "bold" not in {text.get_fontweight() for text in figure.axes[0].texts}


@pytest.mark.parametrize(("critical", "reach"), [(3.0, 4.0), (9.0, 4.0)])
def test_a_critical_difference_beyond_the_axis_is_named(critical: float, reach: float) -> None:
    figure = draw_ranks(replace(RANKS, critical=critical), "A study")
    assert drawn(figure, "difference")[0].get_xdata()[1] == reach
    assert ("CD = 9.00, longer than the axis" in words(figure)) == (critical > 3)
