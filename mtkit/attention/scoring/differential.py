"""Differential attention: each pair of heads subtracts a second softmax map from its first.

Paper: Ye et al., "Differential Transformer", 2024, arXiv 2410.05258, equations 1 to 3. Heads 2n and 2n + 1 are a pair
with a value V of twice the width, o_n = (A_1 - lambda A_2) V, and the output is W_O [(1 - lambda_init) n(o_n)];
n is the RMS norm over the pair's channels. lambda = exp(q_1 . k_1) - exp(q_2 . k_2) + lambda_init, for four learned
vectors of a layer. The equations were checked against the authors' code (microsoft/unilm), not the paper's text.
Departures: l of lambda_init = 0.8 - 0.6 exp(-0.3 l) counts the layers with this mechanism from 0. The encoder and cross
roles are extensions. Checkpoints of Hugging Face's DiffLlama do not fit: it pairs heads n and n + H / 2, and its norm
has no weight.
Cost: O(T S) time, with two sums of values per map. Memory is O(T) with the fused kernel, O(T S) if weights are
requested or if positions that change scores meet dropout. A step costs O(t).
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.layers import ChannelNorm
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import attend, is_plain, upcast, weighted
from mtkit.attention.options import Null, OneOf, Within, refused
from mtkit.attention.slots import combining

NORMS = ("rms", "none")
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Differential(ScoreAttention):
    """Scaled dot-product attention whose heads come in pairs: the first one's weights minus lambda times the second's.

    lambda_init: lambda at the start, up to the random part. norm: whether the outputs of a pair have an RMS norm.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Ye et al. 2024, arXiv 2410.05258"
    slots = combining("positions", "merge", "regularizer", "nearby")
    variants = ({"norm": "none"}, {"lambda_init": 0.0})

    def __init__(
        self,
        site: Site,
        *,
        lambda_init: Annotated[
            Annotated[float, Within(0.0, 0.99)] | None, Null("0.8 - 0.6 exp(-0.3 l) in layer l, from 0")
        ] = None,
        norm: Annotated[str, OneOf(NORMS)] = "rms",
    ) -> None:
        super().__init__(site)
        if site.heads % 2:
            raise refused("heads", site.heads, "be even: the heads of differential attention come in pairs")
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * site.layer) if lambda_init is None else lambda_init
        for name in VECTORS:
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(self.projection.key_width)))
        self.pair_norm = ChannelNorm(2 * self.projection.value_width) if norm == "rms" else nn.Identity()

    @property
    def subtracted(self) -> Tensor:
        """lambda, a scalar in float32 at least."""
        q1, k1, q2, k2 = (upcast(getattr(self, name)) for name in VECTORS)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """Return the pairs' outputs in the layout of heads, and the weights of the H maps."""
        weights = None
        if pairs.state is None and not need_weights and (is_plain(self.positions) or not self.dropout):
            sums = self._fused(pairs)
        else:
            weights, _ = self.weighed(pairs, carry)
            sums = self._sums(weights, pairs)
        return self._differences(sums).type_as(pairs.values), weights, None

    def _fused(self, pairs: Pairs) -> Tensor:
        """Return the sums (B, H, T, 2 V) of the pairs' values under each map, by the fused kernel.

        Without dropout, each half of the values has its own call. With dropout, both halves need the same mask, so one
        call reads them, and zeros make its queries and keys as wide as the values.
        """
        halves = [pairs.values[:, half::2].repeat_interleave(2, 1) for half in (0, 1)]
        how: dict[str, Any] = {"scale": self.scale, "causal": pairs.causal, "valid": pairs.valid}
        if not self.dropout:
            sums = [attend(pairs.q, pairs.keys, v, positions=self.positions, **how)[0] for v in halves]
            return torch.cat(sums, -1)
        q, k = (F.pad(x, (0, x.shape[-1])) for x in (pairs.q, pairs.keys))
        return attend(q, k, torch.cat(halves, -1), dropout=self.dropout, **how)[0]

    def _sums(self, weights: Tensor, pairs: Pairs) -> Tensor:
        """Return the sums (B, H, T, 2 V) of the pairs' values under weights (B, H, T, S) after dropout."""
        dropout = self.dropout if pairs.state is None else 0.0
        weights = F.dropout(weights, dropout) if dropout else weights
        values = torch.cat([pairs.values[:, 0::2], pairs.values[:, 1::2]], -1)  # (B, H / 2, S, 2 V)
        sums = weighted(weights, values)
        if self.positions is not None:
            extra = self.positions.values(weights, pairs.query_position, pairs.key_position)
            sums = sums if extra is None else sums + torch.cat([extra, extra], -1).type_as(sums)
        return sums

    def _differences(self, sums: Tensor) -> Tensor:
        """Return the outputs (B, H, T, V) of the pairs, head 2n with the first half of pair n, from `_sums`."""
        sums = upcast(sums)
        normed = (1 - self.lambda_init) * self.pair_norm(sums[:, 0::2] - self.subtracted * sums[:, 1::2])
        return torch.stack(normed.chunk(2, -1), 2).flatten(1, 2)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add lambda, the same in all pairs."""
        return super().learned_numbers(inputs) | {"lambda": self.subtracted.unsqueeze(0)}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations pair by pair."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        maps = self.softmax(self.scores(pairs), pairs)
        if self.positions is not None and self.positions.on_values:
            extra = self.positions.values(maps, pairs.query_position, pairs.key_position)
        else:
            extra = None
        heads: list[Tensor] = []
        for first in range(0, self.site.heads, 2):
            parts = []
            for head in (first, first + 1):
                added = 0.0 if extra is None else torch.cat([extra[:, head], extra[:, head]], -1)
                parts.append(
                    maps[:, head] @ torch.cat([pairs.values[:, first], pairs.values[:, first + 1]], -1) + added
                )
            output = parts[0] - self.subtracted * parts[1]
            if isinstance(self.pair_norm, ChannelNorm):
                output = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.pair_norm.weight
            heads += ((1 - self.lambda_init) * output).chunk(2, -1)
        return Attended(self.merge_heads(torch.stack(heads, 1), inputs.query), weights=maps)
