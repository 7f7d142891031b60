"""Scaled dot-product attention: every query weighs every key by the softmax of their scaled product.

Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762, equation 1.
Departures: none.
Cost: O(T S) time; memory O(T) through the fused kernel, O(T S) where weights are asked for. A step costs each of
N hypotheses O(N t), as they read each other's rows and hide them (`cached_softmax` reads their own alone); more than 16
have a cache each and pay O(t).
"""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.head_groups import HeadGroup
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, packing
from mtkit.attention.kernels.cached_softmax import attend_cached, pays, takes
from mtkit.attention.kernels.dot_product import attend, is_plain, safe_softmax
from mtkit.attention.scoring._shared_past import SharedPast


class Full(SharedPast):
    """Scaled dot-product attention over all keys."""

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder", "cross"})
    paper = "Vaswani et al. 2017, arXiv 1706.03762"
    complexity = "O(T²)"
    growth = 2
    weights = True
    transposed = False

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """softmax(Q K^T / sqrt(K)) V over the visible keys: a step row by row, a whole sequence by the fused kernel."""
        q, keys, values, visible = pairs.q, pairs.keys, pairs.values, pairs.visible
        if pairs.state is None:
            heads, weights = attend(
                q,
                keys,
                values,
                scale=self.scale,
                causal=pairs.causal,
                valid=pairs.valid,
                positions=self.positions,
                dropout=self.dropout,
                need_weights=need_weights,
            )
            return heads, weights, None
        hidden = 1 if visible is None or visible.shape[2] == 1 else q.shape[2]  # hypotheses see their own pasts
        if need_weights or not (is_plain(self.positions) and takes(q, keys, values) and pays(q, keys, hidden)):
            return super().attended(pairs, carry, need_weights)
        heads = attend_cached(
            q.transpose(1, 2),
            keys.unsqueeze(1),
            values.unsqueeze(1),
            scale=self.scale,
            visible=None if visible is None else visible.transpose(1, 2),
        )
        return heads.transpose(1, 2), None, None

    def weights_to_regularize(self, pairs: Pairs) -> Tensor | None:
        """Some heads' weights are computed beside the fused kernel, which serves the outputs of all."""
        if len(self.weighed_heads) == self.site.heads:
            return None
        group = HeadGroup(self.weighed_heads, self.site.heads)
        return group.weights(pairs.q, pairs.keys, scale=self.scale, visible=pairs.visible, positions=self.positions)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Equation 1 with the whole matrix of scores written out."""
        valid = inputs.context_valid
        q = self.queries(inputs.query)
        k, v = self.keys_values(inputs.context)
        group = self.site.heads // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(self.site.heads // v.shape[1], 1)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * self.scale
        visible = torch.ones_like(scores, dtype=torch.bool)
        if self.site.causal:
            visible = visible & (j <= i)
        if valid is not None:
            visible = visible & valid[:, None, None, :]
        if self.positions is not None:
            bias = self.positions.bias(q, i[:, 0], j, self.scale)
            scores = scores if bias is None else scores + bias
        weights = safe_softmax(scores, visible)
        heads = torch.einsum("bhts,bhsv->bhtv", weights, v)
        if self.positions is not None:
            extra = self.positions.values(weights, i[:, 0], j)
            heads = heads if extra is None else heads + extra
        return Attended(self.joined(heads), weights=weights)
