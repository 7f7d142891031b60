"""Ranges of a compiled loop in as many threads as PyTorch uses."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def in_ranges(loop: Callable[[int, int], None], count: int, least: int = 1) -> None:
    """Call loop(first, last) for ranges of `count` items, `least` or more in each, at the same time."""
    threads = torch.get_num_threads()
    size = max(-(-count // threads), least)
    if size >= count:
        return loop(0, count)
    firsts = range(0, count, size)
    for _ in _pool(os.getpid(), threads).map(lambda first: loop(first, min(first + size, count)), firsts):
        pass  # an error in a range is raised here
    return None


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of this process; a forked copy has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mtkit-loops")
