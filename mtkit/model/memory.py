"""Telling memory that gave out from other errors."""

import torch

GIVES_OUT = (RuntimeError, MemoryError)
"""What is raised then, among other things."""


def gave_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left; for that of the CPU PyTorch has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
