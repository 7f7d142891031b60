"""Score attention in O(T) memory: blocks of queries, whose scores the backward pass computes again.

Queries and keys may have a norm over the channels of each head.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtkit.attention.bases.layers import ChannelNorm
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Site
from mtkit.attention.kernels.reproducible import with_recorded_choices
from mtkit.attention.kernels.tiled_softmax import scores_at_once

LEAST = 16
"""Queries that are computed at a time, at least."""


class QueryBlocks(ScoreAttention):
    """Score attention without a carry, for weights that depend on one query and all keys.

    A short sequence is one block. If weights are requested, all scores are computed at once.
    """

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        if need_weights or pairs.state is not None:
            return super().attended(pairs, carry, need_weights)
        batch, heads, length = pairs.q.shape[:3]
        size = max(scores_at_once(pairs.q.device) // (batch * heads * pairs.values.shape[2]), LEAST)
        if size >= length:
            return super().attended(pairs, carry, need_weights)
        blocks = (_block(pairs, first, first + size) for first in range(0, length, size))
        return torch.cat(self.recomputed(blocks), 2), None, None

    def recomputed(self, parts: Iterable[Pairs]) -> list[Tensor]:
        """Return the outputs (B, H, T, V) of each part, whose scores the backward pass computes again."""
        if not torch.is_grad_enabled():
            return [self._outputs(part) for part in parts]
        return [checkpoint(with_recorded_choices(self._outputs), part, use_reentrant=False) for part in parts]

    def _outputs(self, pairs: Pairs) -> Tensor:
        return super().attended(pairs, None, False)[0]


class NormedHeads(QueryBlocks):
    """The same; with `qk_norm`, queries and keys are normalised before they are rotated.

    All heads share the weights of the two norms.
    """

    def __init__(self, site: Site, *, qk_norm: bool) -> None:
        super().__init__(site)
        width = self.projection.key_width
        self.q_norm, self.k_norm = (ChannelNorm(width) if qk_norm else nn.Identity() for _ in range(2))

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        return self._rotated(self.q_norm(self.projection.queries(self.q_proj(query))), position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v = self.projected(memory, self.k_proj, self.v_proj)
        return self._rotated(self.k_norm(self.projection.keys(k)), position), self.projection.values(v)


def _block(pairs: Pairs, first: int, end: int) -> Pairs:
    """The pairs of queries `first` to `end` - 1, in a causal pass without later keys."""
    block = pairs._replace(q=pairs.q[:, :, first:end], query_position=pairs.query_position[first:end])
    if not pairs.causal:
        return block
    columns = {name: column[:, :, :end] for name, column in pairs.columns.items()}
    return block._replace(columns=columns, key_position=pairs.key_position[:end])
