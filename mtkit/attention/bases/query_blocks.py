"""Score attention in O(T) memory: blocks of queries, whose scores the backward pass computes again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.kernels.reproducible import with_recorded_choices
from mtkit.attention.kernels.tiled_softmax import scores_at_once

LEAST = 16
"""Queries that are computed at a time, at least."""


class QueryBlocks(ScoreAttention):
    """Score attention without a carry, for weights that depend on one query and all keys.

    A short sequence is one block. If weights are requested, all scores are computed at once.
    """

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """The heads' outputs (B, H, T, V), the weights (B, H, T, S) or None, and no carry."""
        batch, heads, length = pairs.q.shape[:3]
        size = max(scores_at_once(pairs.q.device) // (batch * heads * pairs.values.shape[2]), LEAST)
        if need_weights or pairs.state is not None or size >= length:
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


def _block(pairs: Pairs, first: int, end: int) -> Pairs:
    """The pairs of queries `first` to `end` - 1, in a causal pass without later keys."""
    block = pairs._replace(q=pairs.q[:, :, first:end], query_position=pairs.query_position[first:end])
    if not pairs.causal:
        return block
    columns = {name: column[:, :, :end] for name, column in pairs.columns.items()}
    return block._replace(columns=columns, key_position=pairs.key_position[:end])
