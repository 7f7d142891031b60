"""Products with prepared weights: the contract, in the type of the weights, and in bfloat16 on the CPU."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Product(Protocol):
    """x (..., I) to x W^T + b (..., O)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def of(self, rows: Tensor) -> "Product":
        """The product with these rows (K,) of W alone, without bias."""


@dataclass(frozen=True)
class Plain:
    """The product in the type of the weights."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        return nn.functional.linear(x, self.weight, self.bias)

    def of(self, rows: Tensor) -> "Plain":
        """The product with these rows (K,) of W alone, without bias."""
        return Plain(self.weight[rows], None)


class Low:
    """The product in bfloat16 on the CPU, with float32 in and out; sums are in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight) if _packs() else None

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        rows = in_few_counts(x.reshape(-1, x.shape[-1]), torch.bfloat16)
        if self._packed is None:
            low = nn.functional.linear(rows, self._weight, self._bias)
        else:
            low = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return low[: x.shape[:-1].numel()].float().unflatten(0, x.shape[:-1])

    def of(self, rows: Tensor) -> "Low":
        """The product with these rows (K,) of W alone, without bias."""
        return Low(self._weight[rows], None)


def in_few_counts(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows (M, I) in another type, and rows of no meaning behind them, up to a multiple of an eighth of M's octave.

    oneDNN compiles a kernel for each number of rows that it has not yet seen, which takes as long as dozens of
    products; a search that drops finished segments comes to hundreds of numbers.
    """
    count = len(rows)
    step = 1 << max(count.bit_length() - 4, 0)
    wider = rows.new_empty(-(-count // step) * step, rows.shape[1], dtype=dtype)
    wider[:count] = rows
    return wider


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
