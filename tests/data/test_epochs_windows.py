"""The plan of an epoch that is larger than a window."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from mtkit.data.epochs import EpochPart, EpochPlan, plan, plan_epoch
from mtkit.data.prepared import Side
from tests.data.test_epochs import mixed, padding_share, typical

ROWS = 20_000


@pytest.fixture(scope="module")
def side() -> Side:
    return typical(ROWS)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.epochs.WINDOW", 4_000)
    monkeypatch.setattr("mtkit.data.epochs.BLOCK", 64)
    monkeypatch.setattr("mtkit.data.epochs._COUNTED_ROWS", 640)


def in_corpora(side: Side) -> Side:
    """The side with corpora of 15,000, 4,000 and 1,000 rows, one after the other."""
    return replace(side, corpora=np.repeat(np.arange(3, dtype=np.int16), [15_000, 4_000, 1_000]))


def planned(
    side: Side, *, epoch: int = 0, weights: Sequence[float] | None = None, pieces: int | None = None, longest: int = 60
) -> EpochPlan:
    return plan_epoch(side, batch_tokens=1_024, max_length=longest, seed=1, epoch=epoch, weights=weights, pieces=pieces)


def parts_of(found: EpochPlan) -> list[EpochPart]:
    return [part for part, _ in found.parts()]


def test_a_corpus_of_one_window_has_the_batches_that_it_always_had() -> None:
    side = typical(3_000)

    def digest(side: Side, weights: Sequence[float] | None) -> str:
        batches = plan(side, batch_tokens=1_024, max_length=60, seed=1, epoch=2, weights=weights)
        return hashlib.sha256(b"".join(rows.astype(np.int64).tobytes() for rows in batches)).hexdigest()[:16]

    # of what mtkit 0.1 planned before it had windows
    assert digest(side, None) == "31a305c7b9756644"
    assert digest(mixed(side), [1, 2.25, 0.5]) == "fcdacaf68b176a0d"


@pytest.mark.usefixtures("windows")
def test_every_row_that_fits_is_in_one_batch_that_fits(side: Side) -> None:
    wider = np.maximum(side.source.lengths, side.target.lengths) + 1
    found = planned(side)
    assert len(found.sizes) == -(-(wider <= 60).sum() // 4_000)
    batches = [rows for part in parts_of(found) for rows in part.planned(side)]
    assert len(batches) == found.batches
    assert np.array_equal(np.sort(np.concatenate(batches)), np.flatnonzero(wider <= 60))
    assert all(len(rows) * wider[rows].max() <= 1_024 for rows in batches)
    assert padding_share(side, batches) < 0.12


@pytest.mark.usefixtures("windows")
def test_windows_mix_rows_of_everywhere_and_differ_by_epoch(side: Side) -> None:
    first, again, other = (parts_of(planned(side, epoch=epoch)) for epoch in (0, 0, 1))
    assert all(
        np.array_equal(a.rows, b.rows) and np.array_equal(a.order, b.order) for a, b in zip(first, again, strict=True)
    )
    assert not any(np.array_equal(a.rows, b.rows) for a, b in zip(first, other, strict=True))
    for part in first:
        assert abs(part.rows.mean() - ROWS / 2) < ROWS / 8
        assert abs(np.corrcoef(part.rows[:-1], part.rows[1:])[0, 1]) < 0.1
        assert 0 < len(part.rows) <= 4_000 + 64
    assert len(set(first[0].rows.tolist()) & set(other[0].rows.tolist())) < 0.4 * len(first[0].rows)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("pieces", [None, 10_000])
def test_any_batch_is_found_by_drawing_one_window(side: Side, pieces: int | None) -> None:
    found = planned(side, pieces=pieces)
    batches = [rows.tolist() for part in parts_of(found) for rows in part.planned(side)]
    assert (found.batches, len(found.sizes)) == (len(batches), 5)
    assert (len(parts_of(found)) > 20) == (pieces is not None)
    for begin in (0, 1, 107, found.sizes[0], found.batches - 1):
        drawn = list[int]()

        def draw(window: int, drawn: list[int] = drawn) -> Sequence[EpochPart]:
            drawn.append(window)
            return found.draw(window)

        part, skipped = next(replace(found, draw=draw).parts(begin))
        assert part.planned(side)[skipped].tolist() == batches[begin]
        assert len(drawn) == 1
    assert list(found.parts(found.batches)) == []


@pytest.mark.usefixtures("windows")
def test_weights_say_how_often_an_epoch_goes_through_a_corpus(side: Side) -> None:
    several = in_corpora(side)
    fits = np.maximum(side.source.lengths, side.target.lengths) < 60
    drawn = list[np.ndarray]()
    for epoch in (0, 1):
        parts = parts_of(planned(several, epoch=epoch, weights=[0.5, 2.25, 1]))
        rows, copies = (
            np.concatenate(each) for each in zip(*((part.rows, part.copies) for part in parts), strict=True)
        )
        assert len(set(zip(rows.tolist(), copies.tolist(), strict=True))) == len(rows)
        drawn.append(np.bincount(rows, minlength=ROWS))
        assert np.array_equal(np.bincount(rows[copies == 0], minlength=ROWS), drawn[-1] > 0)
    half, more, one = np.split(drawn[0], [15_000, 19_000])
    assert not drawn[0][~fits].any()
    assert (half.sum(), half.max()) == (round(0.5 * fits[:15_000].sum()), 1)
    assert set(more[fits[15_000:19_000]].tolist()) == {2, 3}
    assert (more == 3).sum() == round(0.25 * fits[15_000:19_000].sum())
    assert np.array_equal(one, fits[19_000:])
    both = (half * drawn[1][:15_000]).sum()
    assert 0.4 * half.sum() < both < 0.6 * half.sum()


@pytest.mark.usefixtures("windows")
def test_half_of_a_small_corpus_is_another_half_each_epoch(side: Side) -> None:
    small = replace(side, corpora=(np.arange(ROWS) >= ROWS - 40).astype(np.int16))  # less than a block
    drawn = set[int]()
    for epoch in range(5):
        parts = parts_of(planned(small, epoch=epoch, weights=[1, 0.5], longest=1_024))
        rows = np.concatenate([part.rows for part in parts])
        assert (rows >= ROWS - 40).sum() == 20
        drawn.update(rows[rows >= ROWS - 40].tolist())
    assert len(drawn) > 30


@pytest.mark.usefixtures("windows")
def test_corpora_that_are_dealt_out_row_by_row_are_planned_too(side: Side) -> None:
    small = typical(900)
    drawn = np.concatenate([part.rows for part in parts_of(planned(mixed(small), weights=[1, 9, 0.5], longest=1_024))])
    assert np.bincount(drawn % 3).tolist() == [300, 2_700, 150]
    assert len(planned(mixed(typical(2_000)), weights=[1, 9, 0.5]).sizes) > 1


@pytest.mark.usefixtures("windows")
def test_the_heaviest_windows_have_the_largest_batches(side: Side) -> None:
    found = planned(side, longest=1_024)
    wider = np.maximum(side.source.lengths, side.target.lengths)
    widest = [max(int(wider[part.rows].max()) for part in found.draw(window)) for window in range(len(found.sizes))]
    assert max(range(len(widest)), key=widest.__getitem__) in found.heaviest
    assert len(found.heaviest) <= 2


@pytest.mark.usefixtures("windows")
def test_nothing_is_planned_where_no_row_fits(side: Side) -> None:
    found = planned(side, longest=1)
    assert (found.batches, list(found.parts()), found.heaviest) == (0, [], [])


def test_a_plan_of_many_rows_takes_memory_for_a_window_alone(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    monkeypatch.setattr("mtkit.data.epochs.WINDOW", 50_000)
    large = typical(1_000_000)
    tracemalloc.start()
    try:
        for part, _ in islice(planned(large, longest=1_024).parts(), 2):
            part.planned(large)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(large) + 20_000_000 // 4
    finally:
        tracemalloc.stop()
