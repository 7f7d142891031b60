"""What a computation costs, counted and not timed: values read and written, the largest tensor, multiplications."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION = {  # the CPU's fused attention, which torch's own counter leaves out; arguments are shapes
    FUSED: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    FUSED_BACKWARD: lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v),
}
PICKING = {"index", "gather", "index_select", "embedding", "index_put_", "index_copy_", "scatter_", "select_scatter"}
"""Operations that read or write a few places of a tensor that may be large."""


class Count(TorchDispatchMode):
    """Counts while it is entered, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.touched = 0
        """Values that operations read or wrote; a view reads nothing."""
        self.largest = 0
        """Values in the largest tensor made."""
        self.shapes: set[tuple[int, ...]] = set()
        """Shapes of all tensors made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.overloadpacket.__name__ in PICKING:
            self.touched += sum(sorted(_held(leaf) for leaf in [*made, *read])[:-1])
        else:
            self.touched += sum(_held(leaf) for leaf in [*made, *read])
        self.largest = max([self.largest, *(_held(leaf) for leaf in made)])
        self.shapes |= {tuple(leaf.shape) for leaf in made}
        return result


def _held(tensor: Tensor) -> int:
    """Values in memory: an expanded axis counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return math.prod(sizes)


def count(compute: Callable[[], Any]) -> tuple[Count, int]:
    """The counts and the floating-point operations of `compute()`."""
    counted, flops = Count(), FlopCounterMode(display=False, custom_mapping=ATTENTION)
    with flops, counted:
        compute()
    return counted, flops.get_total_flops()


def exponent(at: float, at_twice: float) -> float:
    """p where a cost grows as T^p between a length and its double."""
    return math.log2(at_twice / at) if at else 0.0


def saved_tensors(compute: Callable[[], Any]) -> list[Tensor]:
    """The tensors of `compute()` that autograd keeps for the backward pass."""
    saved: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with saved_tensors_hooks(note, lambda x: x):
        compute()
    return saved


@torch.no_grad()
def step_costs(attention: Any, steps: int, width: int) -> list[int]:
    """Values that each of the first steps of one hypothesis reads or writes."""
    touched, (state, _) = [], attention.start(1)
    for _ in range(steps):
        with Count() as counted:
            _, state = attention.step(torch.randn(1, 1, width), state)
        touched.append(counted.touched)
    return touched
