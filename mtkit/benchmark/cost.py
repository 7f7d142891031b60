"""What a computation costs besides time, counted while it runs: floating-point operations and peak memory."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mtkit.memory import available_bytes

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {  # the CPU's fused attention, which torch's own counter leaves out; arguments are shapes
    FUSED: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    FUSED_BACKWARD: lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v),
}


@dataclass(frozen=True)
class Cost:
    """What one computation costs.

    `flops` are those of matrix products, convolutions and fused attention, two for a multiplication with its addition;
    a fused attention counts all pairs, also those that causality hides. `peak_bytes` is the most memory held at one
    moment beyond what was held before: on CUDA by the allocator, on the CPU by the tensors that operations gave out,
    without what a kernel takes and frees inside itself.
    """

    flops: int
    peak_bytes: int


def cost_of(compute: Callable[[], Any], device: torch.device) -> Cost:
    """Runs `compute()` once, backward passes in it included, and gives what it cost."""
    counter = _counter()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with counter:
            compute()
        return Cost(counter.get_total_flops(), torch.cuda.max_memory_allocated(device) - before)
    with _LiveBytes() as live, counter:
        compute()
    return Cost(counter.get_total_flops(), live.peak)


def flops_of(compute: Callable[[], Any]) -> int:
    """Runs `compute()` once and gives its `Cost.flops` alone, which takes less time."""
    with _counter() as counter:
        compute()
    return int(counter.get_total_flops())


def held_bytes(state: Any) -> int:
    """Bytes of all tensors in nested containers, each storage once."""
    storages = {id(each): each for each in (_storage(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))}
    return sum(each.nbytes() for each in storages.values())


def free_bytes(device: torch.device) -> float:
    """Memory that a computation on `device` can still take; infinity where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    return available_bytes()


def predict_bytes(held: Mapping[int, float], length: int, growth: float) -> float:
    """The memory needed at `length` by that of shorter lengths, {length: bytes}; 0 where none is known.

    Grows as T^growth from the longest; at growth 2 as a T + b T^2 through the two longest, since much of it is linear.
    """
    shorter = sorted(each for each in held if each <= length)
    if not shorter:
        return 0.0
    last = shorter[-1]
    if growth < 2 or len(shorter) == 1:
        return held[last] * (length / last) ** growth
    before = shorter[-2]
    square = max(0.0, (held[last] / last - held[before] / before) / (last - before))
    return (held[last] / last - square * last) * length + square * length**2


def _counter() -> FlopCounterMode:
    counter: Any = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = _NoModules()
    return cast("FlopCounterMode", counter)


class _NoModules:
    """Counts for the whole alone.

    The counter's own tracker of modules needs gradients of what goes into them, and fails where a view of a parameter
    does while none are kept.
    """

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make while it is entered, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}  # of every storage seen, by identity; 0 where it was there before
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(_storage(leaf), made=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(_storage(leaf), made=True)
        self.peak = max(self.peak, self._live)
        return result

    def _see(self, storage: torch.UntypedStorage, *, made: bool) -> None:
        key = id(storage)  # torch keeps one Python object for a storage as long as the storage lives
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if made else 0
        self._live += self._sizes[key]
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self._live -= self._sizes.pop(key)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
