"""Gated heads: a sigmoid gate, computed from the query, multiplies the outputs of the heads before `out_proj`.

Paper: Qiu et al., "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free", 2025,
arXiv 2505.06708, gate G1: o' = o * sigmoid(W_g x + b); x is the layer's query input, after its norm in a pre-norm
model. The equation was checked against the authors' code, not against the paper's text.
Departures: the gate has a bias, `gate_bias` at the start; the authors' has none. The encoder and cross roles are
extensions. Nodes with queries of their own, as the relay of `star`, have gates from the vectors of these queries.
Cost: the mechanism's, and O(T D H V) time for the gate of each channel, or O(T D H) for one gate per head.
"""

from typing import Annotated

import torch
from torch import Tensor

from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.contract import Inputs, Site, token_means
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import OneOf, Within
from mtkit.attention.slots import Merge

GRANULARITIES = ("elementwise", "headwise")


class Gated(Merge):
    """Concatenated heads, each channel or each head multiplied by a gate that the query computes.

    granularity: whether each channel of a head has its own gate ("elementwise"), or each head one ("headwise").
    gate_bias: initial bias of the gates; at 0 all start near 1/2, at 4, for weights of an ungated model, near 1.
    """

    published = frozenset({"decoder"})
    paper = "Qiu et al. 2025, arXiv 2505.06708"
    reads_query = True
    variants = ({"granularity": "headwise"}, {"gate_bias": 4.0})

    def __init__(
        self,
        site: Site,
        width: int,
        *,
        granularity: Annotated[str, OneOf(GRANULARITIES)] = "elementwise",
        gate_bias: Annotated[float, Within(-30.0, 30.0)] = 0.0,
    ) -> None:
        super().__init__(site, width)
        gates = site.heads * (width if granularity == "elementwise" else 1)
        self.gate_proj = xavier_linear(site.d_model, gates, gate_bias)

    def forward(self, heads: Tensor, query: Tensor) -> Tensor:
        """Map (B, H, T, V) to (B, T, H*V) with gates from query, B * T vectors (..., D)."""
        rows = heads.transpose(1, 2)  # (B, T, H, V)
        gates = self.gates(query.reshape(*rows.shape[:2], self.site.d_model))
        return (rows * gates.type_as(rows)).flatten(2)

    def gates(self, query: Tensor) -> Tensor:
        """Return the gates (B, T, H, V or 1) of query (B, T, D), in float32 at least."""
        return upcast(self.gate_proj(query)).sigmoid().unflatten(-1, (self.site.heads, -1))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the mean gate of each head."""
        if inputs is None:
            return {}
        return {"gate": token_means(self.gates(inputs.query).mean(-1).transpose(1, 2), inputs.query_valid)}
