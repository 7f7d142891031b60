"""Floating-point operations and peak memory of a computation, counted while it runs."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtkit.memory import available_bytes
from mtkit.process import release_freed_memory
from mtkit.training.flops import flop_counter


@dataclass(frozen=True)
class Cost:
    """Cost of one computation.

    `flops` counts matrix products, convolutions and fused attention, two for a multiplication with its addition; fused
    attention counts all pairs, also masked ones. `peak_bytes` is the peak memory minus the memory held at the start:
    on CUDA the allocator's, on the CPU the tensors that operations return, without temporary memory inside kernels.
    """

    flops: int
    peak_bytes: int


def cost_of(compute: Callable[[], Any], device: torch.device) -> Cost:
    """Run `compute()` once, including its backward passes, and return its cost."""
    counter = flop_counter()
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with counter:
            compute()
        return Cost(counter.get_total_flops(), torch.cuda.max_memory_allocated(device) - held)
    with _LiveBytes() as live, counter:
        compute()
    return Cost(counter.get_total_flops(), live.peak)


PROCESS_BYTES = 2.0
"""Memory of a process on the CPU per byte of tensors, rounded up: layers of over 200 MB at 4,096 tokens took up to 1.5
times their tensors."""


def free_bytes(device: torch.device) -> float:
    """Return the bytes of tensors that fit in the free memory; infinity if the system does not report it."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    release_freed_memory()
    return available_bytes() / PROCESS_BYTES


def predict_bytes(held: Mapping[int, float], length: int, growth: float) -> float:
    """Predict the memory at `length` from the memory of shorter lengths, {length: bytes}; 0 if there are none.

    It grows as T^growth from the longest; with growth 2, as a T + b T^2 through the two longest, since much of it is
    linear.
    """
    shorter = sorted(size for size in held if size <= length)
    if not shorter:
        return 0.0
    last = shorter[-1]
    if growth < 2 or len(shorter) == 1:
        return held[last] * (length / last) ** growth
    second = shorter[-2]
    square = max(0.0, (held[last] / last - held[second] / second) / (last - second))
    return (held[last] / last - square * last) * length + square * length**2


class _LiveBytes(TorchDispatchMode):
    """Dispatch mode that follows the live bytes of the storages that operations create."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}  # of every storage seen, by identity; 0 where it was there before
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), created=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), created=True)
        self.peak = max(self.peak, self._live)
        return result

    def _see(self, storage: torch.UntypedStorage, *, created: bool) -> None:
        key = id(storage)  # torch keeps one Python object for a storage as long as the storage lives
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if created else 0
        self._live += self._sizes[key]
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self._live -= self._sizes.pop(key)
