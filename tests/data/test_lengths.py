"""How long the training pairs are: counted once, in flat arrays, and kept."""

import numpy as np
import pytest

from mtkit.data.columns import Tokens
from mtkit.data.lengths import Lengths, measure_lengths
from mtkit.data.prepared import Side


def tokens(lengths: list[int]) -> Tokens:
    """Rows of so many pieces, which nobody reads."""
    return Tokens(np.zeros(0, np.int32), np.zeros(len(lengths), np.int64), np.array(lengths, np.int32))


def side(source: list[int], target: list[int], tasks: list[int] | None = None) -> Side:
    of = None if tasks is None else np.array(tasks, np.int16)
    return Side(tokens(source), tokens(target), np.arange(len(source)), None, None, of)


def lengths(source: list[int], target: list[int], longest: int = 1000) -> Lengths:
    (found,) = measure_lengths(side(source, target), 1, longest)
    return found


def test_ratios_are_those_of_the_pairs_with_their_ends() -> None:
    found = lengths([9] * 100 + [10] * 100, [9] * 150 + [21] * 50)
    (bin_,) = found.bins
    ratios = np.array([1.0] * 100 + [10 / 11] * 50 + [2.0] * 50)
    assert (bin_.longest, bin_.pairs, bin_.most) == (11, 200, 2.0)
    assert (bin_.mean, bin_.spread) == pytest.approx((ratios.mean(), ratios.std()))


def test_a_translation_may_be_as_long_as_any_of_such_a_source() -> None:
    random = np.random.default_rng(1)
    source = random.integers(1, 90, 4000)
    target = np.maximum(1, source * random.uniform(0.5, 6.0, 4000)).astype(int)
    found = lengths(source.tolist(), target.tolist())
    assert len(found.bins) > 5
    limits = np.array([found.limit(pieces + 1) for pieces in range(91)])
    assert (limits[source] > target).all()  # the end of the segment counts too


def test_short_sources_with_long_translations_leave_long_ones_alone() -> None:
    found = lengths([2] * 100 + [50] * 100, [40] * 100 + [50] * 100)
    assert found.limit(3) > 40
    assert found.limit(51) < 80


def test_few_pairs_make_no_bin_of_their_own() -> None:
    """What three pairs say of their length is no more than chance."""
    found = lengths([10] * 500 + [40] * 3, [20] * 500 + [10] * 3)
    assert len(found.bins) == 1
    assert found.limit(41) > 80
    assert found.limit(400) > 800  # nor is what nobody has seen kept shorter


def test_a_rare_ratio_is_allowed_for_where_they_spread() -> None:
    narrow = lengths([20] * 400, [20] * 400).limit(21)
    wide = lengths([20] * 400, [18, 22] * 200).limit(21)
    assert wide > narrow >= 21


def test_pairs_that_are_not_trained_on_do_not_count() -> None:
    found = lengths([10] * 300 + [10, 60], [10] * 300 + [60, 10], longest=50)
    assert sum(each.pairs for each in found.bins) == 300
    assert found.limit(11) < 40
    assert found.percentiles[100] == 11


def test_each_direction_has_its_own() -> None:
    given = side([10] * 600, [10, 60] * 300, [0, 1] * 300)
    german, french = measure_lengths(given, 2, 1000)
    assert (german.limit(11) or 99) < 40
    assert (french.limit(11) or 0) > 60
    assert [each.bins[0].pairs for each in (german, french)] == [300, 300]


def test_percentiles_of_the_sources() -> None:
    found = lengths(list(range(1, 1001)), [5] * 1000, longest=5000)
    assert {share: found.percentiles[share] for share in (50, 99, 100)} == {50: 501, 99: 991, 100: 1001}
    assert lengths(list(range(1, 151)), [5] * 150).percentiles[99] == 150  # 2 of 150 are more than a hundredth


def test_nothing_known_gives_no_limit() -> None:
    assert lengths([], []).limit(12) is None
    assert lengths([100], [5], longest=50).limit(12) is None


def test_more_rows_than_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    given = [random.integers(1, 60, 500).tolist() for _ in range(2)]
    whole = lengths(*given)
    monkeypatch.setattr("mtkit.data.lengths.TOGETHER", 64)
    parts = lengths(*given)
    assert parts.percentiles == whole.percentiles
    for one, other in zip(parts.bins, whole.bins, strict=True):
        assert one.model_dump() == pytest.approx(other.model_dump())


def test_it_comes_back_from_json() -> None:
    found = lengths([10, 20, 30] * 100, [12, 19, 44] * 100)
    assert Lengths.model_validate_json(found.model_dump_json()) == found
