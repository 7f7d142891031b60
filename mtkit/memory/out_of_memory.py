"""Out-of-memory errors: recognising them, and retrying with smaller batches."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")

GIVES_OUT = (RuntimeError, MemoryError)
"""Classes of out-of-memory errors; other errors have these classes too."""

_MESSAGES = re.compile(r"out of memory|allocate memory|bad_alloc|ALLOC_FAILED|ALLOCATION_FAILED")
"""Messages of CUDA and NCCL, PyTorch on the CPU, C++, cuBLAS and older cuDNN, cuDNN, in this order."""


def gave_out(error: BaseException) -> bool:
    """Return whether an error means out of memory. PyTorch has a class only for its own CUDA allocator's errors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


class Halving:
    """Splits a batch of rows in halves if it runs out of memory, and later batches of its size at once."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Take the length of each row. A batch's memory is estimated as its rows times its longest row."""
        self._lengths = lengths
        self._room: int | None = None

    def run(self, work: Callable[[Sequence[int]], Result], rows: Sequence[int]) -> list[Result]:
        """Return the results of `work` for the rows, or for each part of them, in order.

        Raises: the error of `work` if a single row runs out of memory too, or if it is another error.
        """
        longest, half = max(self._lengths[row] for row in rows), -(-len(rows) // 2)
        if len(rows) == 1 or self._room is None or len(rows) * longest <= self._room:
            try:
                return [work(rows)]
            except GIVES_OUT as error:
                if len(rows) == 1 or not gave_out(error):
                    raise
            # outside `except`, no error keeps the failed call's frames and tensors alive
            self._room = half * longest
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # blocks cached in the larger batch's sizes
        return [*self.run(work, rows[:half]), *self.run(work, rows[half:])]
