"""Telling memory that gave out from other errors."""

import re

import torch

GIVES_OUT = (RuntimeError, MemoryError)
"""What is raised then, among other things."""

_SAYS_SO = re.compile(r"out of memory|allocate memory|bad_alloc|ALLOC_FAILED|ALLOCATION_FAILED")
"""In the words of CUDA and NCCL, of PyTorch on the CPU, of C++, of cuBLAS and older cuDNN, of cuDNN."""


def gave_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left: PyTorch has a class for what its own CUDA allocator says."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_SO.search(str(error)) is not None
