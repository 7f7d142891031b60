"""Linear attention: a product of features in place of the exponential of a product, so that keys can be summed first.

Paper: Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", ICML 2020, arXiv 2006.16236, equations 4 to 12.
Departures: none. It does not approximate softmax attention; scores are not divided by the square root of K.
Cost: O(T K V) time, O(T) memory. A step reads and writes K V numbers a head, whatever came before it.
Options: feature_map is elu1 (the paper's elu(x) + 1) or relu; eps is added to the denominator; chunk is the number of
positions worked on at once in the decoder role. Attention dropout acts on the heads' outputs: there are no weights.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.contract import Attended, Site, State
from mtkit.attention.dot_product import widened
from mtkit.attention.feature_sums import FEATURE_MAPS, attend_all, attend_causal, attend_next, read, sums_of
from mtkit.attention.projected import HeadAttention
from mtkit.errors import MtkitError, did_you_mean


class LinearAttention(HeadAttention):
    """Linear attention: sums over keys of positive features, in place of the softmax."""

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder", "cross"})
    paper = "Katharopoulos et al. 2020, arXiv 2006.16236"
    complexity = "O(T)"
    growth = 1
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "positions": frozenset({"rotary"}),  # the others add to scores, of which there are none
        "projection": None,
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"feature_map": "relu"},)

    def __init__(self, site: Site, *, feature_map: str = "elu1", eps: float = 1e-6, chunk: int = 64) -> None:
        super().__init__(site)
        if feature_map not in FEATURE_MAPS:
            hint = did_you_mean(feature_map, list(FEATURE_MAPS))
            raise MtkitError(f"no feature_map '{feature_map}'{hint}; there are {', '.join(FEATURE_MAPS)}")
        if chunk < 1 or eps <= 0:
            raise MtkitError(f"linear needs chunk >= 1 and eps > 0, not chunk = {chunk} and eps = {eps}")
        self.feature_map = FEATURE_MAPS[feature_map]
        self.eps = eps
        self.chunk = chunk

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
        """phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j) + eps) over real keys j, in a decoder j <= i."""
        phi_q = self._features(self.queries(query))
        phi_k, v = self._keys(query if memory is None else memory, query_valid if memory is None else memory_valid)
        if self.site.causal:
            heads = attend_causal(phi_q, phi_k, v, eps=self.eps, chunk=self.chunk)
        else:
            heads = attend_all(phi_q, phi_k, v, eps=self.eps)
        losses = self.losses(heads, v, None, query_valid, memory_valid)
        return Attended(self.joined(F.dropout(heads, self.dropout)), losses=losses)

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
    ) -> tuple[State, Any]:
        """Sums over nothing yet; in the cross role those over the source, once for all hypotheses."""
        if memory is not None:
            return {"shared": {"sums": sums_of(*self._keys(memory, memory_valid))}}, None
        p = self.projection
        groups = max(p.key_heads, p.value_heads)
        like = widened(self.q_proj.weight)
        return {
            "sums": like.new_zeros(batch_size, hypotheses, groups, p.key_width, p.value_width + 1),
            "count": 0,
        }, None

    def step(
        self, query: Tensor, state: State, *, carry: Any = None, need_weights: bool = False
    ) -> tuple[Attended, State]:
        """The same equation for the newest token of each hypothesis; O(K V) a head, at any position."""
        if "shared" in state:
            sums = state["shared"]["sums"]
            heads = read(self._features(self.queries(query)), sums, eps=self.eps, like=query)
            return Attended(self.joined(heads)), state
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        here = torch.full((1,), state["count"], device=query.device)
        phi_q = self._features(self.queries(rows, here))
        phi_k, v = self._keys(rows, None, here)
        heads, _ = attend_next(phi_q, phi_k, v, state["sums"].flatten(0, 1), eps=self.eps)
        output = self.joined(heads).squeeze(1).unflatten(0, query.shape[:2])
        return Attended(output), {"sums": state["sums"], "count": state["count"] + 1}

    def naive(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        **_: Any,
    ) -> Attended:
        """Equation 4: the whole matrix of similarities phi(q_i) . phi(k_j), its visible part normalised by rows."""
        valid = query_valid if memory is None else memory_valid
        phi_q = self._features(self.queries(query))
        k, v = self.keys_values(query if memory is None else memory)
        phi_k = self._features(k).repeat_interleave(self.site.heads // k.shape[1], 1)
        v = v.repeat_interleave(self.site.heads // v.shape[1], 1)
        similarity = torch.einsum("bhtm,bhsm->bhts", phi_q, phi_k)
        if self.site.causal:
            similarity = similarity.tril()
        if valid is not None:
            similarity = similarity * valid[:, None, None, :]
        weights = similarity / (similarity.sum(-1, keepdim=True) + self.eps)
        return Attended(self.joined(torch.einsum("bhts,bhsv->bhtv", weights, v)))

    def _keys(self, memory: Tensor, valid: Tensor | None, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features of the keys, zero at padding, and values."""
        k, v = self.keys_values(memory, position)
        phi_k = self._features(k)
        return phi_k if valid is None else phi_k.masked_fill(~valid[:, None, :, None], 0.0), v

    def _features(self, x: Tensor) -> Tensor:
        return self.feature_map(widened(x))
