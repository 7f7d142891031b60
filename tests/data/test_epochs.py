import time
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mtkit.data.batches import Batch, edges_to, make_batch, prefetch, sort_by_length
from mtkit.data.columns import Tokens
from mtkit.data.epochs import EpochPart, plan, plan_epoch
from mtkit.data.prepared import Prepared, Side
from mtkit.text.tokenizer import BOS, EOS, PAD


def side_of(source: np.ndarray, target: np.ndarray) -> Side:
    """A training side of these lengths, its tokens counted up from 4."""

    def tokens(lengths: np.ndarray) -> Tokens:
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
        return Tokens(np.arange(4, 4 + max(int(lengths.sum()), 1), dtype=np.int32), starts, lengths.astype(np.int32))

    return Side(tokens(source), tokens(target), np.arange(1, len(source) + 1), None, None)


def typical(rows: int) -> Side:
    """Lengths as in real text: log-normal, the target's near the source's."""
    random = np.random.default_rng(3)
    source = np.exp(random.normal(2.9, 0.6, rows)).astype(np.int64) + 1
    return side_of(source, np.maximum(1, (source * random.normal(1.05, 0.2, rows)).astype(np.int64)))


def padding_share(side: Side, batches: list[np.ndarray]) -> float:
    """The share of padding among all source and target positions of a plan, 0 to 1."""
    real = padded = 0
    for rows in batches:
        for lengths in (side.source.lengths[rows], side.target.lengths[rows]):
            real += int(lengths.sum()) + len(rows)
            padded += (int(lengths.max()) + 1) * len(rows)
    return 1 - real / padded if padded else 0.0


@pytest.fixture(scope="module")
def side() -> Side:
    return typical(20_000)


def test_every_row_is_in_exactly_one_batch_that_fits(side: Side) -> None:
    batches = plan(side, batch_tokens=2_048, max_length=1_024, seed=1, epoch=0)
    rows = np.concatenate(batches)
    assert np.array_equal(np.sort(rows), np.arange(len(side)))
    for batch in batches:
        width = max(side.source.lengths[batch].max(), side.target.lengths[batch].max()) + 1
        assert len(batch) * width <= 2_048


def test_few_of_the_positions_are_padding(side: Side) -> None:
    assert padding_share(side, plan(side, batch_tokens=4_096, max_length=1_024, seed=1, epoch=0)) < 0.1


def test_batches_are_filled(side: Side) -> None:
    batches = plan(side, batch_tokens=4_096, max_length=1_024, seed=1, epoch=0)
    wider = np.maximum(side.source.lengths, side.target.lengths) + 1
    assert sum(wider[batch].max() * len(batch) for batch in batches) > 0.9 * 4_096 * len(batches)


def test_batches_have_few_shapes(side: Side) -> None:
    batches = plan(side, batch_tokens=1_024, max_length=1_024, seed=1, epoch=0)
    made = [make_batch(side, rows, 1_024) for rows in batches]
    assert len(made) > 500
    assert len({each.numel() for batch in made for each in (batch.source, batch.target_in)}) < 60
    real = sum(int(batch.source_valid.sum() + batch.target_valid.sum()) for batch in made)
    assert real / sum(batch.source.numel() + batch.target_in.numel() for batch in made) > 0.95


def test_widths_are_rounded_up_as_far_as_the_model_goes() -> None:
    side = side_of(np.array([64, 99, 20]), np.array([66, 98, 70]))
    wide = make_batch(side, np.array([0, 1]), 1_024)
    assert (wide.source.shape[1], wide.target_in.shape[1]) == (100, 100)
    assert (wide.source == PAD).sum() == 35
    narrow = make_batch(side, np.array([0, 2]), 70)
    assert (narrow.source.shape[1], narrow.target_in.shape[1]) == (68, 71)


def test_a_plan_depends_on_seed_and_epoch_and_nothing_else(side: Side) -> None:
    def made(seed: int, epoch: int) -> list[list[int]]:
        torch.manual_seed(seed)
        np.random.seed(epoch)
        return [each.tolist() for each in plan(side, batch_tokens=2_048, max_length=100, seed=seed, epoch=epoch)]

    assert made(1, 0) == made(1, 0)
    first, next_epoch, other_seed = (set(map(tuple, made(*key))) for key in ((1, 0), (1, 1), (2, 0)))
    # not only another order of the same batches
    assert len(first & next_epoch) < 0.02 * len(first)
    assert len(first & other_seed) < 0.02 * len(first)


def test_batches_come_in_no_order_of_length(side: Side) -> None:
    batches = plan(side, batch_tokens=2_048, max_length=1_024, seed=1, epoch=0)
    widths = np.array([side.source.lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(widths[:-1], widths[1:])[0, 1]) < 0.2


def test_rows_over_the_limit_are_left_out_and_wide_ones_stand_alone() -> None:
    side = side_of(np.array([3, 50, 9, 10, 3]), np.array([3, 3, 9, 3, 12]))
    batches = plan(side, batch_tokens=8, max_length=11, seed=1, epoch=0)
    assert sorted(batch.tolist() for batch in batches) == [[0], [2], [3]]
    assert plan(side, batch_tokens=8, max_length=2, seed=1, epoch=0) == []


def test_millions_of_rows_are_planned_at_once() -> None:
    side = typical(1_000_000)
    began = time.process_time()
    batches = plan(side, batch_tokens=4_096, max_length=1_024, seed=1, epoch=0)
    assert time.process_time() - began < 5
    assert sum(map(len, batches)) + side.too_long(1_024) == len(side)


@pytest.mark.parametrize("longest", [30, 20_000])
def test_rows_are_sorted_by_buckets_of_both_sides_as_a_loop_would(longest: int) -> None:
    random = np.random.default_rng(5)
    source, target = random.integers(0, longest, (2, 500)).astype(np.int32)
    edges = edges_to(int(max(source.max(), target.max())) + 1).tolist()

    def key(row: int) -> tuple[int, int]:
        own, other = (next(at for at, edge in enumerate(edges) if edge > each[row]) for each in (source, target))
        return max(own, other), (own - other) * (1 if max(own, other) % 2 == 0 else -1)

    assert sort_by_length(source, target).tolist() == sorted(range(500), key=key)  # both are stable


def test_planning_takes_few_bytes_a_row() -> None:
    rows = 1_000_000
    lengths = np.random.default_rng(1).integers(1, 60, rows).astype(np.int32)
    tokens = Tokens(np.zeros(1, dtype=np.int32), np.zeros(rows, dtype=np.int64), lengths)
    side = Side(tokens, tokens, np.arange(rows), None, None)
    tracemalloc.start()
    try:
        plan_epoch(side, batch_tokens=4096, max_length=64, seed=1, epoch=0)
        assert tracemalloc.get_traced_memory()[1] < 48 * rows
    finally:
        tracemalloc.stop()


def mixed(side: Side) -> Side:
    """The side with its rows dealt to three corpora, one after the other."""
    return replace(side, corpora=(np.arange(len(side)) % 3).astype(np.int16))


def test_weights_say_how_often_an_epoch_goes_through_a_corpus(side: Side) -> None:
    rows = [
        np.concatenate(
            plan(mixed(side), batch_tokens=2_048, max_length=1_024, seed=1, epoch=epoch, weights=[1, 2.25, 0.5])
        )
        for epoch in (0, 1)
    ]
    times = [np.bincount(each, minlength=len(side)) for each in rows]
    whole, more, half = (times[0][corpus::3] for corpus in range(3))
    assert (whole == 1).all()
    assert set(more) == {2, 3}
    assert (more == 3).sum() == round(0.25 * len(more))
    assert set(half) == {0, 1}
    assert half.sum() == round(0.5 * len(half))
    # another half each epoch, unrelated to the one before
    both = (half * times[1][2::3]).sum()
    assert 0.2 * len(half) < both < 0.3 * len(half)


@pytest.mark.parametrize(("weight", "most"), [(2.25, 2), (2.0, 1), (1.5, 1)])
def test_each_copy_of_a_row_has_a_number_of_its_own_in_the_epoch(side: Side, weight: float, most: int) -> None:
    def planned(side: Side, weights: list[float] | None = None) -> list[EpochPart]:
        found = plan_epoch(side, batch_tokens=2_048, max_length=1_024, seed=1, epoch=0, weights=weights, pieces=5_000)
        return [part for part, _ in found.parts()]

    parts = planned(mixed(side), weights=[1, weight, 0.5])
    rows, copies = (np.concatenate(each) for each in zip(*((part.rows, part.copies) for part in parts), strict=True))
    assert len(parts) > 3
    assert copies.max() == most
    assert len(set(zip(rows.tolist(), copies.tolist(), strict=True))) == len(rows)
    assert (copies == 0).sum() == len(np.unique(rows))
    assert not any(part.copies.any() for part in planned(side))


def test_weights_of_one_change_nothing_but_the_draw(side: Side) -> None:
    rows = np.concatenate(
        plan(mixed(side), batch_tokens=2_048, max_length=60, seed=1, epoch=0, weights=[1.0, 1.0, 1.0])
    )
    assert len(np.unique(rows)) == len(rows) == len(side) - side.too_long(60)
    tiny = mixed(side_of(np.array([3, 3, 3]), np.array([3, 3, 3])))
    assert plan(tiny, batch_tokens=99, max_length=9, seed=1, epoch=0, weights=[0.1, 0.1, 0.1]) == []


def test_the_halves_of_a_batch_are_the_batches_of_their_rows(builtin: Prepared) -> None:
    rows = np.array([4, 0, 9, 2, 7])
    side = replace(builtin.train, tasks=(np.arange(len(builtin.train)) % 2).astype(np.int16))
    batch = make_batch(side, rows)
    for half, wanted in zip(batch.halves(), (make_batch(side, rows[:3]), make_batch(side, rows[3:])), strict=True):
        assert_same(half, wanted)
        assert half.size < batch.size


def assert_same(one: Batch, other: Batch) -> None:
    for name in ("source", "source_valid", "target_in", "target_out", "target_valid", "task"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.target_tokens == other.target_tokens
    assert one.lines.tolist() == other.lines.tolist()


def test_a_batch_holds_the_direction_of_each_segment_where_there_are_several(builtin: Prepared) -> None:
    rows = np.array([4, 1, 9])
    assert make_batch(builtin.train, rows).task is None
    side = replace(builtin.train, tasks=(np.arange(len(builtin.train)) % 2).astype(np.int16))
    task = make_batch(side, rows).task
    assert task is not None
    assert (task.dtype, task.tolist()) == (torch.int64, [0, 1, 1])


def test_a_batch_holds_its_rows_shifted_for_the_decoder(builtin: Prepared) -> None:
    side, rows = builtin.train, np.array([4, 0, 9])
    batch = make_batch(side, rows)
    for index, row in enumerate(rows):
        source, target = side.source[row].tolist(), side.target[row].tolist()
        assert batch.source[index].tolist()[: len(source) + 1] == [*source, EOS]
        assert batch.target_in[index].tolist()[: len(target) + 1] == [BOS, *target]
        assert batch.target_out[index].tolist()[: len(target) + 1] == [*target, EOS]
        assert batch.source_valid[index].sum() == len(source) + 1
        assert batch.target_valid[index].sum() == len(target) + 1
    for tokens, valid in (
        (batch.source, batch.source_valid),
        (batch.target_in, batch.target_valid),
        (batch.target_out, batch.target_valid),
    ):
        assert torch.equal(tokens != PAD, valid)
        assert valid.any(0).all(), "no column is all padding"
    assert batch.target_tokens == batch.target_valid.sum()
    assert batch.lines.tolist() == [5, 1, 10]


def test_an_empty_segment_is_its_end_mark_alone() -> None:
    batch = make_batch(side_of(np.array([0, 2]), np.array([0, 1])), np.array([0]))
    assert batch.source.tolist() == batch.target_out.tolist() == [[EOS]]
    assert batch.target_in.tolist() == [[BOS]]


def test_prefetched_batches_are_the_plan_in_order(builtin: Prepared) -> None:
    batches = plan(builtin.train, batch_tokens=512, max_length=100, seed=1, epoch=0)
    lines = [batch.lines.tolist() for batch in prefetch(partial(make_batch, builtin.train), batches[3:], ahead=2)]
    assert lines == [builtin.train.lines[rows].tolist() for rows in batches[3:]]


def test_leaving_early_ends_the_thread(builtin: Prepared) -> None:
    import threading

    for _ in prefetch(partial(make_batch, builtin.train), [np.array([0])] * 1_000, ahead=2):
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "mtkit-batches"]


def test_what_goes_wrong_in_the_thread_is_raised(builtin: Prepared) -> None:
    made = prefetch(partial(make_batch, builtin.train), [np.array([0]), np.array([10**9])])
    next(made)
    with pytest.raises(IndexError):
        next(made)


def test_memory_stays_flat_over_epochs(side: Side) -> None:
    def epoch(number: int) -> None:
        batches = plan(side, batch_tokens=65_536, max_length=200, seed=1, epoch=number)
        for _ in prefetch(partial(make_batch, side), batches):
            pass

    tracemalloc.start()
    epoch(0)
    after_one = tracemalloc.get_traced_memory()[0]
    for number in range(1, 4):
        epoch(number)
    grown = tracemalloc.get_traced_memory()[0] - after_one
    tracemalloc.stop()
    assert grown < 200_000


def test_copies_are_numbered_for_every_weight_above_one(side: Side) -> None:
    found = plan_epoch(side, batch_tokens=2_048, max_length=1_024, seed=1, epoch=0, weights=[1.5])
    rows, copies = (np.concatenate(each) for each in zip(*((p.rows, p.copies) for p, _ in found.parts()), strict=True))
    assert copies.sum() == len(rows) - len(np.unique(rows)) > 0
