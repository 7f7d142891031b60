"""Memory that is full: telling it from other errors, and going on with smaller batches."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")

GIVES_OUT = (RuntimeError, MemoryError)
"""What is raised then, among other things."""

_SAYS_SO = re.compile(r"out of memory|allocate memory|bad_alloc|ALLOC_FAILED|ALLOCATION_FAILED")
"""In the words of CUDA and NCCL, of PyTorch on the CPU, of C++, of cuBLAS and older cuDNN, of cuDNN."""


def gave_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left: PyTorch has a class for what its own CUDA allocator says."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_SO.search(str(error)) is not None


class Halving:
    """Runs batches of rows in halves where the memory does not hold them whole, and then those after them as well."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Of each row its length; as much memory as rows times the longest of them is what a batch takes."""
        self._lengths = lengths
        self._room: int | None = None

    def run(self, work: Callable[[Sequence[int]], Result], rows: Sequence[int]) -> list[Result]:
        """What `work` makes of the rows, or of each part of them, in order.

        Raises: what `work` does, where memory gives out for a single row too.
        """
        longest, half = max(self._lengths[row] for row in rows), -(-len(rows) // 2)
        if len(rows) == 1 or self._room is None or len(rows) * longest <= self._room:
            try:
                return [work(rows)]
            except GIVES_OUT as error:
                if len(rows) == 1 or not gave_out(error):
                    raise
            # out here no error keeps the frames, and with them the tensors, of what failed
            self._room = half * longest
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # what is cached in the sizes of the larger batch
        return [*self.run(work, rows[:half]), *self.run(work, rows[half:])]
