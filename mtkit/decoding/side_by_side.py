"""Batches side by side on a CPU: a second core speeds small products little; a second batch gains nearly all of it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MOST = 8
"""Batches at a time, at most: all are in memory, and between PyTorch's operations Python runs one thread at once."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device) -> Iterator[Result]:
    """What `work` makes of each item, in order: on a CPU of several at a time, which share PyTorch's threads evenly.

    `work` runs under the caller's inference mode and autocast. On an accelerator, whose queue is one, items take turns.
    A caller that leaves early, or is interrupted, waits for the items that have been begun.
    """
    workers = at_once(device, len(items))
    if workers <= 1:
        yield from map(work, items)
        return
    modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def alike(item: Item) -> Result:
        inference, autocast, dtype = modes
        with torch.inference_mode(inference), torch.autocast("cpu", dtype, enabled=autocast):
            return work(item)

    with _threads(torch.get_num_threads() // workers), ThreadPoolExecutor(workers) as pool:
        try:
            for result in [pool.submit(alike, item) for item in items]:
                yield result.result()
        finally:  # one has failed, or nobody wants the rest
            pool.shutdown(cancel_futures=True)


def at_once(device: torch.device, items: int = MOST) -> int:
    """How many of so many items are worked on at a time: on a CPU each has as many of PyTorch's threads."""
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads()
    each = -(-threads // max(1, min(threads, items, MOST)))
    return threads // each  # with 12 threads six of two each, rather than eight of one


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Inside, each thread's operations are spread over so many; a new thread asks how many when it first computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
