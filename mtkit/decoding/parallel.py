"""Parallel batches on a CPU: a second core speeds small products up little, a second batch of them almost twofold."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MOST = 8
"""Items at a time, at most: between PyTorch's operations Python runs one thread at once."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Item], Result], items: Sequence[Item], device: torch.device, most: int = MOST
) -> Iterator[Result]:
    """The results of `work` on each item, in order; a CPU computes several at once, which share the threads of PyTorch.

    At most `most` are computed at once. `work` runs under the inference mode and autocast of the caller. An
    accelerator, which has one queue, computes one item at a time. A caller that leaves early or is interrupted waits
    for the items already started.
    """
    workers = at_once(device, len(items), most)
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
        finally:  # an item has failed, or the caller has left
            pool.shutdown(cancel_futures=True)


def at_once(device: torch.device, items: int | None = None, most: int = MOST) -> int:
    """The number of items computed at a time; on a CPU, each gets an equal number of the threads of PyTorch.

    items: how many there are; None: enough.
    """
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads()
    each = -(-threads // max(1, min(threads, most if items is None else items, most)))
    return threads // each  # with 12 threads six of two each, rather than eight of one


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """A context in which operations use this number of threads; a new thread reads it at its first operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
