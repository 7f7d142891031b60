"""Random feature attention with gates: a decoder whose sums over keys forget earlier keys, by learned gates.

Paper: Peng, Pappas, Yogatama, Schwartz, Smith and Kong, "Random Feature Attention", ICLR 2021, arXiv 2103.02143,
section 3.2 (RFA-Gate).
Departures: as in `rfa`, except the default number of directions. The magnitude of the denominator is at least 1e-3
times the visible keys' remaining gate factors, so that a first token gets its own value at any gate. Dropout acts on
the outputs of the heads.
Cost: as in `rfa`, O(T M V) time, O(T) memory for M features. A step reads at most 2 M V numbers per head, at any
position.
"""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.contract import Inputs, Site, for_heads, token_means
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import Gates
from mtkit.attention.linear._random_features import FEATURE_MAPS, RandomFeatureAttention
from mtkit.attention.options import OneOf, Positive, Within
from mtkit.attention.slots import OWN_VECTORS, combining


class GatedRFA(RandomFeatureAttention):
    """Random feature attention with a learned gate per head that fades earlier keys.

    feature_map: "sine" (the Gaussian kernel; a sine and a cosine for each direction) or "arc-cosine" (relu(w x), 1 for
    each direction). features: number of random directions D. tau: temperature of the kernel. learn_sigma: whether each
    head learns a factor for each component of the directions. pool: number of matrices of directions that training
    picks from. gate_bias: initial bias of the gates; 2.2 keeps 0.9 of the sums at each token. chunk: number of
    positions computed at once.
    """

    roles = published = frozenset({"decoder"})
    slots = combining("merge", positions={"rotary"}, projection=OWN_VECTORS, regularizer={"disagreement"})
    variants = ({"feature_map": "arc-cosine"}, {"gate_bias": -1.0})
    gated = True

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf(FEATURE_MAPS)] = "sine",
        features: Positive = 64,
        tau: Annotated[float, Within(1e-3, 1e3)] = 1.0,
        learn_sigma: bool = True,
        pool: Positive = 200,
        gate_bias: Annotated[float, Within(-20.0, 20.0)] = round(math.log(9.0), 4),
        chunk: Positive = 128,
    ) -> None:
        super().__init__(
            site, feature_map=feature_map, features=features, tau=tau, learn_sigma=learn_sigma, pool=pool, chunk=chunk
        )
        groups = max(self.projection.key_heads, self.projection.value_heads)
        self.gate = xavier_linear(site.d_model, groups, gate_bias)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean share of the sums that a head keeps at a token."""
        learned = super().learned_numbers(inputs)
        if inputs is not None:
            gates = self.gates_of(inputs.query).kept.squeeze(-1).exp()
            learned["kept share"] = for_heads(token_means(gates, inputs.query_valid), self.site.heads)
        return learned

    def gates_of(self, query: Tensor) -> Gates:
        """Return the gates of S_t = g_t S_t-1 + (1 - g_t) phi(k_t) v_t^T with g_t = sigmoid(w x_t + b)."""
        logits = upcast(self.gate(query)).transpose(1, 2).unsqueeze(-1)
        return Gates(F.logsigmoid(logits), (-logits).sigmoid())
