"""Token embeddings with absolute positions, added or concatenated."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.model.sublayers import Dropout


class Embedding(nn.Module):
    """Vectors of tokens, scaled by the root of their width, with absolute positions and dropout.

    Positions of width D are added to vectors of width D, or positions of width P are concatenated after vectors of
    width D - P. Paper: Vaswani et al., 2017, sections 3.4 and 3.5. A table of width W starts at N(0, 1/W), so that each
    channel of a scaled vector has unit variance, like the positions.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: "Sinusoidal | Learned | None",
        dropout: float,
        *,
        concatenated: bool = False,
    ) -> None:
        super().__init__()
        self.concatenated = concatenated
        self.tokens = tokens
        self.positions = positions
        self.dropout = Dropout(dropout)
        self.scale = math.sqrt(tokens.embedding_dim)

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        """ids (B, T) to (B, T, D); places (B, T) are their positions, 0 to T - 1 if None."""
        x = _lowered(embed(ids, self.tokens.weight) * self.scale)
        return self.dropout(self._with_positions(x, slice(ids.shape[1]) if places is None else places))

    def at(self, ids: Tensor, place: int | Tensor) -> Tensor:
        """ids (B, N), all at the same position or at those given, (B, N), to (B, N, D)."""
        x = _lowered(self.tokens(ids) * self.scale)
        return self._with_positions(x, place if isinstance(place, Tensor) else slice(place, place + 1))

    def _with_positions(self, x: Tensor, places: slice | Tensor) -> Tensor:
        if self.positions is None:
            return x
        positions = self.positions.table[places].type_as(x)
        return torch.cat([x, positions.expand(*x.shape[:-1], -1)], -1) if self.concatenated else x + positions


def _lowered(x: Tensor) -> Tensor:
    """x in bfloat16 under CUDA's autocast to it, so that products and sums up to the output need no conversion."""
    low = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return x.bfloat16() if low else x


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """The rows ids (...) of a table (V, D), as (..., D).

    A row's gradient is a sum over its occurrences, hundreds for a frequent token. For a bfloat16 table it is summed in
    float32, as by PyTorch's kernel on a GPU.
    """
    if table.dtype == torch.bfloat16 and table.requires_grad and table.device.type == "cpu":
        rows: Tensor = _LowPrecisionEmbedding.apply(ids, table)  # type: ignore[no-untyped-call]
        return rows
    return nn.functional.embedding(ids, table)


class _LowPrecisionEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return nn.functional.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        sums = torch.zeros(ctx.rows, upstream.shape[-1], device=upstream.device)
        sums.index_add_(0, ids.flatten(), upstream.flatten(0, -2).float())
        return None, sums.to(upstream.dtype)


def token_table(vocabulary: int, width: int) -> nn.Embedding:
    """A new table of token vectors, N(0, 1/D)."""
    table = nn.Embedding(vocabulary, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


class Sinusoidal(nn.Module):
    """A table (max_length, D) of sines and cosines of geometric wavelengths.

    sinusoidal: pe[2i] = sin(p 10000^(-2i/D)) and pe[2i + 1] its cosine (Vaswani et al., 2017, section 3.5).
    sinusoidal-halves: the same channels, all sines first (Hugging Face's Marian and Pegasus).
    sinusoidal-cat: all sines first, with frequencies exp(-i ln(10000) / (D/2 - 1)) (tensor2tensor, fairseq, Marian), so
    not a permutation of the others. An odd last channel is zero.
    """

    table: Tensor

    def __init__(self, max_length: int, width: int, kind: str = "sinusoidal") -> None:
        super().__init__()
        pairs = width // 2
        steps = torch.arange(pairs, dtype=torch.float64)
        exponent = steps / max(pairs - 1, 1) if kind == "sinusoidal-cat" else 2 * steps / width
        angle = torch.arange(max_length, dtype=torch.float64).unsqueeze(1) * 10_000.0**-exponent
        parts = (angle.sin(), angle.cos())
        waves = torch.stack(parts, dim=2).flatten(1) if kind == "sinusoidal" else torch.cat(parts, dim=1)
        table = nn.functional.pad(waves, (0, width - 2 * pairs)).float()
        self.register_buffer("table", table, persistent=False)


class Learned(nn.Module):
    """A table (max_length, D) with a learned vector for each position."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, width))
        nn.init.normal_(self.table, std=width**-0.5)


def absolute_positions(kind: str, max_length: int, width: int) -> Sinusoidal | Learned | None:
    """The module for a recipe's `model.positions`."""
    if kind == "none":
        return None
    if kind == "learned":
        return Learned(max_length, width)
    return Sinusoidal(max_length, width, kind)
