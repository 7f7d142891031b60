"""Main memory: out-of-memory errors, limits for models, and the peak of this process."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mtkit.errors import MtkitError

Result = TypeVar("Result")

OOM_ERRORS = (RuntimeError, MemoryError)
"""Classes of out-of-memory errors; other errors have these classes too."""

_MESSAGES = re.compile(r"out of memory|allocate memory|bad_alloc|ALLOC_FAILED|ALLOCATION_FAILED")
"""Messages of CUDA and NCCL, PyTorch on the CPU, C++, cuBLAS and older cuDNN, cuDNN, in this order."""


def is_oom(error: BaseException) -> bool:
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
            except OOM_ERRORS as error:
                if len(rows) == 1 or not is_oom(error):
                    raise
            # outside `except`, no error keeps the failed call's frames and tensors alive
            self._room = half * longest
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # blocks cached in the larger batch's sizes
        return [*self.run(work, rows[:half]), *self.run(work, rows[half:])]


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
    """Context that limits the weights of the modules built in it to the available memory.

    Weights are counted when a module registers them, before it fills them.

    Raises: MtkitError with `advice` if they exceed it, or memory runs out.
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
    except OOM_ERRORS as error:
        if not is_oom(error):
            raise
        raise MtkitError(f"the model's weights do not fit in memory: {advice}") from error
    finally:
        handle.remove()


def too_large(weights: float, advice: str) -> MtkitError:
    """An error for a model whose weights take that many bytes or more."""
    return MtkitError(
        f"the model's weights would take {in_words(weights)} of memory or more, and {in_words(available_bytes())} are "
        f"available here: {advice}"
    )


LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's memory limit, in the two versions of Linux control groups."""


def machine_bytes() -> float:
    """The memory of the machine, or a lower limit of the container or the process; infinity if unknown."""
    limits = [float("inf")]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for path in LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            limits.append(float(int(path.read_text(encoding="ascii"))))
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(float(limit))
    return min(limits)


def memory_bytes(device: torch.device) -> float:
    """The memory of a GPU, or `machine_bytes`."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_bytes()


def available_bytes() -> float:
    """The memory that this process can still allocate; infinity if unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return machine_bytes()
    kilobytes = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").split("\n") if line)
    return min(machine_bytes(), 1024.0 * int(kilobytes["MemAvailable"].split()[0]))


def in_words(count: float, digits: int = 3) -> str:
    """Format a number of bytes with its unit, as "1.5 TiB", in at most so many digits, or in 4 from 1,000."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 1024:
            return f"{count:.{digits if count < 999.5 else max(digits, 4)}g} {unit}"
        count /= 1024
    return "more than 1024 PiB"


def held_bytes(state: Any, *, without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of all tensors in nested containers; shared storages count once, those in `without` not."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    known = {tensor.untyped_storage()._cdata for tensor in without}
    return sum(size for key, size in storages.items() if key not in known)


def _bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    """Return the tensor's size in bytes, by creating it on the meta device."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        tensor: Tensor = func(*args, **{**kwargs, "device": "meta"})
    except (RuntimeError, TypeError, OverflowError):  # sizes beyond 64 bits
        return float("inf")
    return float(tensor.nbytes)


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():  # getrusage's peak would include the parent process's peak
        for line in STATUS.read_text(encoding="ascii", errors="replace").split("\n"):
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_peak() -> None:
    """Reset the peaks of main memory, if the system supports it (Linux), and of the GPU to the memory held now."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        FORGET.write_text("5")  # proc(5): VmHWM becomes VmRSS
