"""Recordings of tensor operations, repeated one by one: what a CUDA graph does, on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

REFUSED = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount",
    "equal", "is_nonzero", "_linalg_check_errors",
}  # fmt: skip
"""Operations for whose results a host would wait for its GPU; so would it for indices that are masks."""


class _Recording(TorchDispatchMode):
    """Keeps each operation with the memory of its arguments and results, and what this memory held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else []
        masks = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        counted = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in REFUSED or masks or counted:
            raise RuntimeError(f"{name} is not permitted when stream is capturing")
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._save(kwargs[argument.name])
        results = func(*args, **kwargs)
        outputs = [each.detach() for each in tree_leaves(results) if isinstance(each, Tensor)]
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        own = [each for each in outputs if _memory(each) not in given]
        self.made |= {_memory(each): each for each in own}
        self.calls.append((func, args, kwargs, own))
        return results

    def _save(self, changed: Any) -> None:
        for tensor in [changed] if isinstance(changed, Tensor) else changed:
            if (place := _memory(tensor)) not in self.made and place not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[place] = whole, whole.clone()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def record_operations(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record as a CUDA graph: nothing is computed now, and each repetition reads and writes the same memory.

    Numbers of the host are those of the recording. Raises: RuntimeError if the host would wait.
    """
    recording = _Recording()
    with torch.random.fork_rng([]), recording:
        results = compute()
    for whole, values in recording.before.values():
        whole.copy_(values)
    for tensor in recording.made.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    @torch.no_grad()
    def run() -> None:
        for func, args, kwargs, own in recording.calls:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            if own:
                for to, value in zip(own, again, strict=True):
                    to.copy_(value)

    return results, run
