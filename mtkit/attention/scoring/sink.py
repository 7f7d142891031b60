"""Attention with a sink: the softmax has one more entry, without a value, so that a query may attend to nothing.

Papers: Miller, "Attention Is Off By One", 2023 (an essay on the web): softmax with 1 added to its denominator; OpenAI,
"gpt-oss", 2025 (its PyTorch model): a learned logit z_h of the sink in each head. Background: Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453. The weight of key j is
exp(s_ij) / (exp(z_h) + sum_j exp(s_ij)), which is full attention's times sigmoid(log sum_j exp(s_ij) - z_h). The essay
was not at hand; gpt-oss' code was.
Departures: the encoder and cross roles are extensions.
Cost: O(T S) time. Memory is O(T), because scores are computed for some of the queries at a
time and again in the backward pass, or O(T S) if weights are requested. A step costs O(t).

Weights of a row sum to less than 1: the rest is the sink's. Dropout acts on the weights of keys, not on the sink.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import OneOf, Within

KINDS = ("learned", "zero")


class Sink(QueryBlocks):
    """Scaled dot-product attention whose softmax has one more entry, the sink, whose value is zero.

    kind: whether the logit of the sink is learned in each head, or 0 ("zero", softmax1). sink_init: initial logit of a
    learned sink; -60 is attention without a sink.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Miller 2023; OpenAI 2025 (gpt-oss)"
    variants = ({"kind": "zero"}, {"sink_init": 2.0})

    def __init__(
        self,
        site: Site,
        *,
        kind: Annotated[str, OneOf(KINDS)] = "learned",
        sink_init: Annotated[float, Within(-60.0, 60.0)] = 0.0,
    ) -> None:
        super().__init__(site)
        self.sink = nn.Parameter(torch.full((site.heads,), sink_init)) if kind == "learned" else None

    def softmax(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """Return the weights of the keys, in float32 at least; they sum to 1 minus the weight of the sink."""
        logits, visible = self.with_positions(logits, pairs), pairs.visible
        if visible is not None:
            logits = logits.where(visible, torch.finfo(logits.dtype).min)
        sink = (logits.new_zeros(1) if self.sink is None else upcast(self.sink)).view(-1, 1, 1)
        top = logits.amax(-1, keepdim=True).maximum(sink).detach()  # so that no sum is below 1
        parts = (logits - top).exp()
        return parts / (parts.sum(-1, keepdim=True) + (sink - top).exp())

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the logit of each head's sink."""
        learned = super().learned_numbers(inputs)
        return learned if self.sink is None else learned | {"sink logit": self.sink.clone()}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the softmax over keys and sink, and leave the sink's weight out."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        scores = self.with_positions(self.scores(pairs), pairs)
        if pairs.visible is not None:
            scores = scores.masked_fill(~pairs.visible, -torch.inf)
        sink = scores.new_zeros(self.site.heads) if self.sink is None else self.sink
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([column, scores], -1).softmax(-1)[..., 1:]
        return Attended(self.merge_heads(self.outputs(weights, pairs), inputs.query), weights=weights)
