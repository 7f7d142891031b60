"""Parallel batches on a CPU: two threads speed up one batch of small products little, two batches almost twofold."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MOST = 8
"""Maximum items at a time: between PyTorch's operations, Python runs only one thread."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Item], Result], items: Sequence[Item], device: torch.device, most: int = MOST
) -> Iterator[Result]:
    """The results of `work` on each item, in order; a CPU computes up to `most` at once, which share PyTorch's threads.

    `work` runs under the inference mode and autocast of the caller. An accelerator, which has one queue, computes one
    item at a time. A caller that leaves early or is interrupted waits for the items already started.
    """
    workers = at_once(device, len(items), most)
    if workers <= 1:
        yield from map(work, items)
        return
    modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def in_modes(item: Item) -> Result:
        inference, autocast, dtype = modes
        with torch.inference_mode(inference), torch.autocast("cpu", dtype, enabled=autocast):
            return work(item)

    threads = torch.get_num_threads()
    torch.set_num_threads(threads // workers)  # a new thread reads it at its first operation
    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for result in [pool.submit(in_modes, item) for item in items]:
                    yield result.result()
            finally:  # after an error, or if the caller leaves early
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(threads)


def at_once(device: torch.device, items: int | None = None, most: int = MOST) -> int:
    """The number of items computed at a time; on a CPU, they share PyTorch's threads equally.

    `items` is the number of items; None: at least `most`.
    """
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads()
    threads_each = -(-threads // max(1, min(threads, most if items is None else items, most)))
    return threads // threads_each  # with 12 threads six of two each, rather than eight of one
