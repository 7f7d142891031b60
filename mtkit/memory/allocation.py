"""Models that memory cannot hold are refused while they are built, before anything of that size is allocated."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtkit.errors import MtkitError

FACTORIES = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
}


class WithinMemory(TorchFunctionMode):
    """A context in which tensors are made until all of them together would take more than the machine's memory.

    `what` is being built: it begins the message. Raises: MtkitError saying what it would take.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._bytes, self._most = what, 0.0, machine_bytes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            self._bytes += _bytes(func, args, kwargs)
            if self._bytes > self._most:
                raise MtkitError(
                    f"{self._what} would take {in_words(self._bytes)} of memory or more, and this machine has "
                    f"{in_words(self._most)}: choose smaller sizes"
                )
        return func(*args, **kwargs)


def machine_bytes() -> float:
    """The machine's memory; infinity where the system does not say."""
    known = getattr(os, "sysconf_names", {})
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if "SC_PHYS_PAGES" in known else float("inf")


def in_words(count: float) -> str:
    """ "1.5 TiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1024
    return "more than 1024 PiB"


def _bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    """What the tensor would take: it is made without its numbers."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        made: Tensor = func(*args, **{**kwargs, "device": "meta"})
    except (RuntimeError, TypeError, OverflowError):  # sizes beyond 64 bits
        return float("inf")
    return float(made.nbytes)
