"""Sigmoid attention: a sigmoid of each score instead of the softmax, so that keys do not compete.

Paper: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024, arXiv 2409.04431,
section 2: the weight of key j for query i is sigmoid(q_i . k_j / sqrt(K) + b), and nothing is normalised. b = -log n
for n keys, so that the weights of a row sum to about 1 at the start. The equations were checked against the authors'
code, and the best practices against the paper's abstract and the authors' configuration.
Departures: b differs by row by default: -log of the number of keys that the query may see. The batch's padded
length would let padding change results, and the final length would let later tokens change earlier ones; the authors'
configuration has the constant -7.62 = -log 2048, which the option `bias` can be. The cross role is an extension.
`qk_norm`, RMS norms of queries and keys that all heads share, and `output_norm`, an RMS norm of the heads' merged
outputs before `out_proj`, are off by default; the paper advises norms against instability early in training. The
paper's norm is on the sub-layer's output; here, `out_proj` follows the norm, so that a sub-layer without keys gives the
bias of `out_proj` only.
Cost: O(T S) time, without a fused kernel, because PyTorch's have a softmax in them. Memory is O(T), because scores are
computed for some of the queries at a time and again in the backward pass, or O(T S) if weights are requested. A step
costs O(t).

Weights of a row do not sum to 1. Alignments and coverage read them as they are.
"""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from mtkit.attention.bases.layers import ChannelNorm
from mtkit.attention.bases.query_blocks import NormedHeads
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Null, Within


class Sigmoid(NormedHeads):
    """Attention whose weights are sigmoids of the scores plus a bias; they do not sum to 1.

    bias: number added to all scores. qk_norm: whether queries and keys have an RMS norm over the channels of a head.
    output_norm: whether the merged heads have an RMS norm.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder"})
    paper = "Ramapuram et al. 2024, arXiv 2409.04431"
    variants = ({"bias": -2.0},)

    def __init__(
        self,
        site: Site,
        *,
        bias: Annotated[
            Annotated[float, Within(-30.0, 30.0)] | None, Null("-log of the number of keys that a query may see")
        ] = None,
        qk_norm: bool = False,
        output_norm: bool = False,
    ) -> None:
        super().__init__(site, qk_norm=qk_norm)
        self.bias = bias
        self.output_norm = ChannelNorm(self.projection.joined_width) if output_norm else nn.Identity()

    def softmax(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """Return the sigmoids of logits, positions and bias, in float32 at least; zero where keys are hidden."""
        weights, visible = (self.with_positions(logits, pairs) + self._bias(pairs)).sigmoid(), pairs.visible
        return weights if visible is None else weights.where(visible, 0.0)

    def _bias(self, pairs: Pairs) -> Tensor | float:
        """Return b, broadcastable to (B, H, T, S)."""
        if self.bias is not None:
            return self.bias
        if self.site.causal:
            count = (pairs.query_position + 1).unsqueeze(-1)  # in a step, too
        elif pairs.valid is None:
            count = pairs.key_position.new_full((1,), len(pairs.key_position))
        else:
            count = pairs.valid.sum(-1).clamp(min=1)[:, None, None, None]
        return -count.to(upcast(pairs.q).dtype).log()

    def merged(self, heads: Tensor, query: Tensor) -> Tensor:
        normed: Tensor = self.output_norm(super().merged(heads, query))
        return normed

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equation query by query."""
        query, context, valid = inputs.query, inputs.context, inputs.context_valid
        pairs = self.pairs(query, inputs.memory, valid)
        scores = self.with_positions(self.scores(pairs), pairs)
        weights = scores.new_zeros(len(query), self.site.heads, query.shape[1], context.shape[1])
        for b in range(len(query)):
            for i in range(query.shape[1]):
                n = context.shape[1] if valid is None else int(valid[b].sum())
                n = i + 1 if self.site.causal else n
                constant = -math.log(max(n, 1)) if self.bias is None else self.bias
                weights[b, :, i, :n] = 1 / (1 + torch.exp(-scores[b, :, i, :n] - constant))
        return Attended(self.merge_heads(self.outputs(weights, pairs), query), weights=weights)
