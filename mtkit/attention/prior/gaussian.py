"""Gaussian attention: a learned bell over the distance of query and key is multiplied into the weights.

Paper: Guo, Zhang and Liu, "Gaussian Transformer: A Lightweight Approach for Natural Language Inference", AAAI 2019,
doi 10.1609/aaai.v33i01.33016489.
Departures: each head has its own parameters, unless heads share them; the paper's factor of pi is part of w.
The absolute value around the bias is the paper's: without it b is the same for all keys of a query and cancels, as in
a known implementation. With it a token's own score is reduced by |b|, and keys at distance sqrt(-b / w) are preferred.
Cost: O(T²) time and memory, because the added bias rules out the fused kernel; the bias itself is the same for all
segments and has T values per head. A step costs O(t).
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Within


class Gaussian(ScoreAttention):
    """Scaled dot-product attention with -|w (i - j)² + b| added to its scores, with learned w > 0 > b.

    initial_w, initial_b: initial values. shared_heads: whether all heads share one w and one b.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Guo et al. 2019, doi 10.1609/aaai.v33i01.33016489"
    undecayed = ("raw_w", "raw_b")

    def __init__(
        self,
        site: Site,
        *,
        initial_w: Annotated[float, Within(1e-6, 1e6)] = 0.1,
        initial_b: Annotated[float, Within(-1e6, -1e-6)] = -0.5,
        shared_heads: bool = False,
    ) -> None:
        super().__init__(site)
        heads = 1 if shared_heads else site.heads
        self.raw_w = nn.Parameter(torch.full((heads, 1), _raw(initial_w)))
        self.raw_b = nn.Parameter(torch.full((heads, 1), _raw(-initial_b)))

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """Return Q K^T / sqrt(K) - |w (i - j)² + b|, in at least float32."""
        distance = (pairs.query_position.unsqueeze(-1) - pairs.key_position).abs()  # (T, S)
        table = self.table(torch.arange(len(pairs.key_position), device=distance.device))
        bias = table.index_select(1, distance.flatten()).unflatten(1, distance.shape)
        return upcast(self.scores(pairs)) + bias, None

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add w, b, and the distance at which the bias is 0, its maximum: sqrt(-b / w)."""
        w, b = F.softplus(upcast(self.raw_w)).squeeze(1), -F.softplus(upcast(self.raw_b)).squeeze(1)
        return super().learned_numbers(inputs) | {"w": w, "b": b, "favoured distance": (-b / w).sqrt()}

    def table(self, distance: Tensor) -> Tensor:
        """Return -|w d² + b| for each head and distance, (H, ...), in float32: half precision is too small for d²."""
        w, b = F.softplus(upcast(self.raw_w)), -F.softplus(upcast(self.raw_b))
        return -(w * distance.type_as(w).square() + b).abs()

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Multiply the softmax weights by the bell e^-|w (i - j)² + b| and normalise again, pair by pair."""
        query = inputs.query
        pairs = self.pairs(query, valid=inputs.query_valid)
        length = query.shape[1]
        w, b = F.softplus(self.raw_w), F.softplus(self.raw_b)
        bells = [(-(w * (i - j) ** 2 - b).abs()).exp() for i in range(length) for j in range(length)]
        bell = torch.cat(bells, 1).expand(self.site.heads, -1).unflatten(1, (length, length))
        weights = self.softmax(self.scores(pairs), pairs) * bell
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return Attended(self.merge_heads(self.outputs(weights, pairs), query), weights=weights)


def _raw(value: float) -> float:
    """Return the number whose softplus is the value."""
    return value + math.log(-math.expm1(-value))
