"""Attention with a sink: the softmax has one more entry, without a value, so that a query may attend to nothing.

Papers: Miller, "Attention Is Off By One", 2023 (an essay on the web): softmax with 1 added to its denominator; OpenAI,
"gpt-oss", 2025 (its PyTorch model): a learned logit z_h of the sink in each head. Background: Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453. The weight of key j is
exp(s_ij) / (exp(z_h) + sum_j exp(s_ij)), which is full attention's times sigmoid(log sum_j exp(s_ij) - z_h). The essay
was not at hand; gpt-oss' code was.
Departures: the encoder and cross roles are extensions.
Cost: O(T S) time. Memory is O(T), or O(T S) if weights are requested. A step costs O(t).

Weights of a row sum to less than 1: the rest is the sink's. Dropout acts on the weights of keys, not on the sink.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import attend, is_plain, upcast
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

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """Compute a forward pass by the fused kernel of full attention, with the sink as one more key.

        Two more channels hold its logit: of keys, 0, of the sink's key, 1, and of queries, the logit z_h and the error
        by which a low type rounds it. A causal pass has one more query too, so that the sink is before all others.
        """
        by_query = pairs.valid is not None and pairs.valid.dim() == 3
        if need_weights or pairs.state is not None or by_query or not is_plain(self.positions):
            return super().attended(pairs, carry, need_weights)
        q, v = pairs.q, pairs.values
        logit = q.new_zeros(1, dtype=torch.float32) if self.sink is None else upcast(self.sink)
        logit = (logit / self.scale).view(-1, 1, 1).expand(q.shape[1], q.shape[2], 1)
        coarse = logit.detach().to(q.dtype)
        fine = (logit - coarse).to(q.dtype)
        channels = torch.cat([coarse, fine], -1).expand(len(q), -1, -1, -1)
        width = -(-max(q.shape[3] + 2, v.shape[3]) // 8) * 8  # of queries, keys and values alike, as the kernel has it
        queries = F.pad(torch.cat([q, channels], -1), (0, width - q.shape[3] - 2, int(pairs.causal), 0))
        one = F.pad(q.new_ones(len(v), pairs.keys.shape[1], 1, 2), (q.shape[3], width - q.shape[3] - 2))
        keys = torch.cat([one, F.pad(pairs.keys, (0, width - q.shape[3]))], 2)
        values = F.pad(v, (0, width - v.shape[3], 1, 0))
        valid = None if pairs.valid is None else F.pad(pairs.valid, (1, 0), value=True)
        heads, _ = attend(
            queries, keys, values, scale=self.scale, causal=pairs.causal, valid=valid, dropout=self.dropout
        )
        return heads[:, :, int(pairs.causal) :, : v.shape[3]], None, None

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
