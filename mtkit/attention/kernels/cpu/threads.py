"""Whether compiled loops replace PyTorch's operations, and their ranges in as many threads as PyTorch uses."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

LARGEST = 1 << 18
"""Multiplications of one product up to which BLAS starts no threads of its own."""


def loops_take(*tensors: Tensor) -> bool:
    """Return whether compiled loops compute with these: float32 on the CPU.

    Not while a dispatch mode counts FLOPs or memory: it sees only PyTorch's operations.
    """
    return _get_current_dispatch_mode() is None and all(x.is_cpu and x.dtype == torch.float32 for x in tensors)


@cache
def has_blas() -> bool:
    """Return whether loops can multiply matrices: numba calls the BLAS of SciPy.

    SciPy is no dependency, because numba would import it with every command.
    """
    return find_spec("scipy") is not None


def by_token(x: Tensor) -> Tensor:
    """Return x (B, H, T, X) as (B, T, H, X), one after the other in memory."""
    return x.detach().transpose(1, 2).contiguous()


def array_of_parameter(parameter: Tensor) -> NDArray[np.float32]:
    """Return a copy of the parameter, one row after the other in memory.

    Not the parameter itself: PyTorch never releases memory that NumPy has seen, and `training.shard` must.
    """
    array: NDArray[np.float32] = parameter.detach().clone(memory_format=torch.contiguous_format).numpy()
    return array


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
