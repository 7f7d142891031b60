"""Top-k attention: the softmax of each query runs over its k best keys only.

Papers: Gupta, Dar, Goodman, Ciprut and Berant, "Memory-efficient Transformers via Top-k Attention", 2021,
arXiv 2106.06899; on translation, in the self and cross roles, Zhao et al., "Explicit Sparse Transformer", 2019,
arXiv 1912.11637. A query sees the visible keys whose scores are at least its k-th largest score, all keys if fewer are
visible. A draft of Zhao et al. and the code of Gupta et al. were at hand.
Departures: keys that tie for the k-th place are all seen, as in Zhao et al.'s equation and code; Gupta et al. keep
exactly k. Scores are chosen by with their bias of positions. k is a number of keys; Zhao et al.'s code can also take a
share of the padded length, with which padding would change results. The backward pass computes scores again;
Gupta et al. store the k best.
Cost: O(T S) time. Memory is O(T), because scores are computed for some of the queries at a time, or O(T S) if weights
are requested. A step costs O(t).

Queries, keys and scores are in float32 at least: rounding to bfloat16 would make ties, and change choices.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import safe_softmax
from mtkit.attention.kernels.reproducible import replay_choice
from mtkit.attention.options import Positive


class TopK(QueryBlocks):
    """Scaled dot-product attention to the best keys of each query.

    keys: number of keys that a query sees; more if several tie for the last place.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Gupta et al. 2021, arXiv 2106.06899"
    longest_path = "by content"
    unrounded = True
    small: ClassVar[Mapping[str, Any]] = {"keys": 3}

    def __init__(self, site: Site, *, keys: Positive = 8) -> None:
        super().__init__(site)
        self.best = keys

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, K), in float32 at least."""
        return self.exact_queries(query, position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to keys (B, G, S, K), in float32 at least, and values (B, G, S, V)."""
        return self.exact_keys_values(memory, position)

    def scores(self, pairs: Pairs) -> Tensor:
        """(B, H, T, S), scaled, in float32 at least."""
        with torch.autocast(pairs.q.device.type, enabled=False):
            return super().scores(pairs)

    def softmax(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """Return the weights of the best keys; all others have zero."""
        logits, seen = self.with_positions(logits, pairs), pairs.visible
        if logits.shape[-1] > self.best:
            visible = logits.detach() if seen is None else logits.detach().where(seen, torch.finfo(logits.dtype).min)
            best = replay_choice(visible >= visible.topk(self.best).values[..., -1:], 2)
            seen = best if seen is None else best & seen
        return safe_softmax(logits, seen)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Choose the keys of each query by sorting its visible scores."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        logits = self.with_positions(self.scores(pairs), pairs)
        logits = logits.expand(len(inputs.query), -1, -1, -1)
        visible = torch.ones_like(logits, dtype=torch.bool) if pairs.visible is None else pairs.visible
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for index in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
            at = tuple(index)
            keys, row = visible.expand_as(logits)[at].nonzero().squeeze(1).tolist(), logits[at].tolist()
            scores = sorted((row[key] for key in keys), reverse=True)
            seen[at] = torch.tensor([key in keys and row[key] >= scores[: self.best][-1] for key in range(len(row))])
        weights = safe_softmax(logits, seen)
        return Attended(self.merge_heads(self.outputs(weights, pairs), inputs.query), weights=weights)
