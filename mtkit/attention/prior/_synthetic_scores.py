"""Scores without pairs of tokens: learned by position, or predicted by each token from what it holds.

Each kind is called with tokens (B, T, D), their position, and the number S of keys, and gives scores (B or 1, H, T, S);
position (1,) is that of all tokens of a step, None stands for 0 to T - 1. (Tay et al., 2021, arXiv 2005.00743.)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RandomScores(nn.Module):
    """A map R (H, N, M) for N queries and M keys."""

    def __init__(self, heads: int, queries: int, keys: int, fixed: bool) -> None:
        super().__init__()
        self.map: Tensor
        _add(self, "map", _drawn(heads, queries, keys), fixed)

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        """The rows of R at these positions, for all segments (1, H, T, S)."""
        return _rows(self.map, position, tokens.shape[1])[:, :, :number].unsqueeze(0)


class FactorizedRandomScores(nn.Module):
    """A map R1 R2^T of rank r, from R1 (H, N, r) and R2 (H, M, r)."""

    def __init__(self, heads: int, queries: int, keys: int, rank: int, fixed: bool) -> None:
        super().__init__()
        self.left: Tensor
        self.right: Tensor
        _add(self, "left", _drawn(heads, queries, rank), fixed)
        _add(self, "right", _drawn(heads, keys, rank), fixed)

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        """The same rows of the product."""
        left = _rows(self.left, position, tokens.shape[1])
        return (left @ self.right[:, :number].transpose(-1, -2)).unsqueeze(0)


class DenseScores(nn.Module):
    """W2 relu(W1 x + b1) + b2: M scores of each head from the token, through a hidden layer of its width."""

    undecayed = ("bias",)

    def __init__(self, d_model: int, heads: int, keys: int) -> None:
        super().__init__()
        width = d_model // heads
        self.heads = heads
        self.hidden = nn.Linear(d_model, heads * width)
        nn.init.xavier_uniform_(self.hidden.weight)
        nn.init.zeros_(self.hidden.bias)
        self.weight = nn.Parameter(_drawn(heads, keys, width))
        self.bias = nn.Parameter(torch.zeros(heads, keys))

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        """The first S scores alone are computed."""
        hidden = F.relu(self.hidden(tokens)).unflatten(-1, (self.heads, -1))  # (B, T, H, K)
        scores = torch.einsum("bthk,hsk->bhts", hidden, self.weight[:, :number].type_as(hidden))
        return scores + self.bias[:, None, :number]


class FactorizedDenseScores(nn.Module):
    """alpha_(j mod a) beta_(j div a): a + b predicted numbers in place of a b or fewer."""

    def __init__(self, d_model: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.alpha = DenseScores(d_model, heads, inner)
        self.beta = DenseScores(d_model, heads, -(-keys // inner))

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        """The product of the two, beta by beta."""
        alpha = self.alpha(tokens, position, self.inner)
        beta = self.beta(tokens, position, -(-number // self.inner))
        return (beta.unsqueeze(-1) * alpha.unsqueeze(-2)).flatten(-2)[..., :number]


def _rows(table: Tensor, position: Tensor | None, count: int) -> Tensor:
    """Rows (H, T, X) of a table (H, N, X)."""
    return table[:, :count] if position is None else table.index_select(1, position)


def _drawn(heads: int, rows: int, columns: int) -> Tensor:
    """Matrices (H, rows, columns) as Glorot and Bengio draw them, each for itself."""
    bound = math.sqrt(6 / (rows + columns))
    return torch.empty(heads, rows, columns).uniform_(-bound, bound)


def _add(module: nn.Module, name: str, value: Tensor, fixed: bool) -> None:
    """A parameter, or a saved buffer that is never trained."""
    if fixed:
        module.register_buffer(name, value)
    else:
        module.register_parameter(name, nn.Parameter(value))
