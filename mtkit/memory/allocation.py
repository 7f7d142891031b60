"""Refuses models larger than the machine's memory while they are built, before the excess is allocated."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from mtkit.errors import MtkitError
from mtkit.memory.out_of_memory import GIVES_OUT, gave_out

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FACTORIES = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
}


class WithinMemory(TorchFunctionMode):
    """Context that adds up the sizes of the tensors created in it and limits the sum to the machine's memory.

    `what` names the object being built and begins the message. Raises: MtkitError with the memory it would take.
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


@contextmanager
def weights_within_memory(advice: str) -> Iterator[None]:
    """A context in which modules are made until the weights of all of them would take more memory than is available.

    Weights are counted when a module registers them, before it fills them.

    Raises: MtkitError with `advice` then, and if memory gives out.
    """
    counted: dict[int, Tensor] = {}  # tied weights are registered several times
    total, most = 0, available_bytes()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        if parameter is not None and id(parameter) not in counted:
            counted[id(parameter)] = parameter
            total += parameter.nbytes
            if total > most:
                raise too_large(total, advice)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except GIVES_OUT as error:
        if not gave_out(error):
            raise
        raise MtkitError(f"the memory is too small for the model's weights: {advice}") from error
    finally:
        handle.remove()


def too_large(weights: float, advice: str) -> MtkitError:
    """The error for a model whose weights take that many bytes or more."""
    return MtkitError(
        f"the model's weights would take {in_words(weights)} of memory or more, and {in_words(available_bytes())} are "
        f"available here: {advice}"
    )


LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, as the two versions of Linux control groups show it."""


def machine_bytes() -> float:
    """The memory that this process may use: the machine's, or a lower limit of its container or of its own.

    Infinity if the system does not say.
    """
    known = [float("inf")]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        known.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for path in LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            known.append(float(int(path.read_text(encoding="ascii"))))
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        known.append(float(limit))
    return min(known)


def available_bytes() -> float:
    """The memory that this process can still take; infinity if the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return machine_bytes()
    kilobytes = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").split("\n") if line)
    return min(machine_bytes(), 1024.0 * int(kilobytes["MemAvailable"].split()[0]))


def in_words(count: float) -> str:
    """Format a number of bytes with its unit, as "1.5 TiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1024
    return "more than 1024 PiB"


def _bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    """Return the tensor's size in bytes, by creating it on the meta device."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        tensor: Tensor = func(*args, **{**kwargs, "device": "meta"})
    except (RuntimeError, TypeError, OverflowError):  # sizes beyond 64 bits
        return float("inf")
    return float(tensor.nbytes)
