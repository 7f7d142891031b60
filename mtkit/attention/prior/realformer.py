"""RealFormer: the scores of each layer are added to those of the layers below, and the softmax is over the sum.

Paper: He, Ravula, Kanagal and Ainslie, "RealFormer: Transformer Likes Residual Attention", Findings of ACL 2021,
arXiv 2012.11747, section 3.
Departures: none. What travels up the layers is scores alone: no mask, position bias or dropout, which would add up.
Cost: O(T S) time and memory: the carried scores rule out the fused kernel. A step costs O(t).
Options: running_mean takes the softmax of the mean over the layers in place of the sum, for deep stacks.
"""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.contract import Attended, Site, State
from mtkit.attention.engines.heads.key_value_attention import KeyValueAttention
from mtkit.attention.engines.softmax.dot_product import by_hypotheses, scores_of, visible_keys, weigh, widened


class RealFormer(KeyValueAttention):
    """Scaled dot-product attention with a residual: scores add up from layer to layer."""

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder", "cross"})
    paper = "He et al. 2021, arXiv 2012.11747"
    complexity = "O(T²)"
    growth = 2
    weights = True

    def __init__(self, site: Site, *, running_mean: bool = False) -> None:
        super().__init__(site)
        self.running_mean = running_mean

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        need_weights: bool = False,
    ) -> Attended:
        """softmax(R) V with R = Q K^T / sqrt(K) + the R (B, H, T, S) of the layer below; carries R."""
        valid = query_valid if memory is None else memory_valid
        q = self.queries(query)
        k, v = self.keys_values(query if memory is None else memory)
        residual = self._summed(scores_of(q, k, self.scale), carry)
        heads, weights = weigh(
            self._softened(residual),
            q,
            v,
            scale=self.scale,
            visible=visible_keys(q, k, self.site.causal, valid),
            positions=self.positions,
            query_position=torch.arange(q.shape[2], device=q.device),
            key_position=torch.arange(k.shape[2], device=q.device),
            dropout=self.dropout,
        )
        losses = self.losses(heads, v, weights, query_valid, memory_valid)
        return Attended(self.joined(heads), carry=residual, weights=weights if need_weights else None, losses=losses)

    def step(
        self, query: Tensor, state: State, *, carry: Any = None, need_weights: bool = False
    ) -> tuple[Attended, State]:
        """The same equation for the newest token of each hypothesis; its row of R travels up the layers. O(t)."""
        newest, state = self.newest(query, state)
        residual = self._summed(scores_of(newest.q, newest.keys, self.scale), carry)
        heads, weights = weigh(
            self._softened(residual),
            newest.q,
            newest.values,
            scale=self.scale,
            visible=newest.visible,
            positions=self.positions,
            query_position=newest.query_position,
            key_position=newest.key_position,
        )
        weights = by_hypotheses(weights, query.shape[1])
        output = self.joined(by_hypotheses(heads, query.shape[1]))
        return Attended(output, carry=residual, weights=weights if need_weights else None), state

    def _summed(self, scores: Tensor, below: Tensor | None) -> Tensor:
        """R of this layer, in float32 at least. What stands below the first layer of a run is none of its own."""
        return widened(scores) if below is None or self.site.layer == 0 else widened(scores) + below

    def _softened(self, residual: Tensor) -> Tensor:
        return residual / (self.site.layer + 1) if self.running_mean else residual
