"""Outputs of layer norms that are computed again in the backward pass instead of being kept for it.

A norm keeps its input for its own gradient, and each linear map that reads its output keeps the output, although the
output is a function of the input. With preset `small` and `full`, computing it again takes 0.4% of an update.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recomputed:
    """A tensor that `compute` returns, computed at the first of its uses in the backward pass and freed at the last."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._tensor: Tensor | None = None
        self.uses = 0

    def use(self) -> Tensor:
        """Return the tensor for one of its uses."""
        if (tensor := self._tensor) is None:
            with torch.no_grad():
                tensor = self._compute()
        self.uses -= 1
        self._tensor = tensor if self.uses > 0 else None
        return tensor


def norms_recomputed(device: torch.device) -> AbstractContextManager[object]:
    """Inside, forward passes on the CPU do not keep tensors with an attribute `recomputed`, nor views of them.

    On a GPU all outputs are kept: it would take longer to start the kernels again than to run them.
    """
    return saved_tensors_hooks(_pack, _unpack) if device.type == "cpu" else nullcontext()


def _pack(x: Tensor) -> Any:
    owner = x if x._base is None else x._base
    recomputed: Recomputed | None = getattr(owner, "recomputed", None)
    if recomputed is None or x._version > 0 or x.dtype != owner.dtype:
        return x.detach()  # an operation that kept its own output, with its history, would never be freed
    recomputed.uses += 1
    return recomputed, x.size(), x.stride(), x.storage_offset()


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    recomputed, *layout = kept
    return recomputed.use().as_strided(*layout)
