"""Several batches at a time on a CPU: in order, under the caller's modes, and leaving nothing behind."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mtkit.decoding.parallel import MOST, parallel_map, plan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads() -> None:
    meeting = threading.Barrier(3, timeout=20)

    def work(item: int) -> tuple[int, int]:
        if item < 3:
            meeting.wait()  # returns only when three are at work at once
        time.sleep(0.01 * (item % 2))
        return item, torch.get_num_threads()

    assert list(parallel_map(work, range(10), CPU)) == [(item, 1) for item in range(10)]


def test_few_items_share_all_threads() -> None:
    torch.set_num_threads(4)
    try:
        assert list(parallel_map(lambda item: torch.get_num_threads(), range(2), CPU)) == [2, 2]
        assert list(parallel_map(lambda item: torch.get_num_threads(), range(1), CPU)) == [4]
        torch.set_num_threads(12)  # more than batches at a time
        assert list(parallel_map(lambda item: torch.get_num_threads(), range(20), CPU)) == [2] * 20
        torch.set_num_threads(4)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(3)


def test_an_accelerator_gets_one_item_at_a_time() -> None:
    here = threading.get_ident()
    found = list(parallel_map(lambda item: threading.get_ident(), range(5), torch.device("cuda")))
    assert found == [here] * 5
    assert MOST > 1


def test_work_runs_in_the_callers_modes() -> None:
    def work(item: int) -> tuple[bool, torch.dtype]:
        return torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert set(parallel_map(work, range(6), CPU)) == {(True, torch.bfloat16)}
    assert set(parallel_map(work, range(6), CPU)) == {(False, torch.float32)}


def test_a_failure_stops_the_rest() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 0:
            raise ValueError("this one")
        time.sleep(0.05)
        return item

    with pytest.raises(ValueError, match="this one"):
        list(parallel_map(work, range(1000), CPU))
    assert len(begun) < 1000


def test_nobody_works_on_for_a_caller_that_has_left() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.02)
        return item

    results = parallel_map(work, range(1000), CPU)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert len(begun) < 1000


def test_every_segment_comes_once_and_batches_keep_to_their_size() -> None:
    lengths = [3, 50, 1, 7, 7, 2, 30, 9, 1, 200]
    batches = plan(lengths, batch_tokens=120, hypotheses=2)
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    assert batches[0] == [9]  # alone: it is longer than a batch
    for batch in batches[1:]:
        assert max(lengths[index] for index in batch) * len(batch) * 2 <= 120
    widths = [lengths[index] for batch in batches for index in batch]
    assert widths == sorted(widths, reverse=True)
    assert len(batches) <= 5
    assert plan([], 100, 1) == []


def test_batches_that_are_worked_on_at_once_end_together() -> None:
    lengths = [50] * 90
    assert [len(batch) for batch in plan(lengths, 2000, 1)] == [40, 40, 10]
    assert [len(batch) for batch in plan(lengths, 2000, 1, at_once=2)] == [23, 23, 23, 21]
    assert [len(batch) for batch in plan(lengths, 2000, 1, at_once=3)] == [30, 30, 30]
    assert [len(batch) for batch in plan(lengths, 49, 1, at_once=2)] == [1] * 90  # each is longer than a batch
    assert [len(batch) for batch in plan([50] * 8, 2000, 1, at_once=8)] == [8]  # too few to part
    assert plan([], 100, 1, at_once=2) == []
