"""Improved clustered: clustered attention that is exact at the keys with the largest weights of each cluster.

Paper: Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", NeurIPS 2020, arXiv 2007.04825,
section 3.3. A^c are the weights of the mean query of cluster c, top_c the k keys with the largest weights in A^c, and
m_c is the sum of these weights. Query i of cluster c has the weights
    w_ij = m_c softmax over top_c of (q_i . k_j / sqrt(K))   for j in top_c,   w_ij = A^c_j for all others.
Departures: as in `clustered`. If a segment has at most k tokens, all keys are in top_c, and the equal `full`
is computed instead.
Dropout acts on each query's weights within top_c, and on the weights A^c of each cluster.
Cost: O(T C (K + bits iterations) + T k K) time; O(T C) memory for a few heads at a time, and O(T).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtkit.attention.compressed._clustered_queries import Bits, ClusteredQueries, Iterations, of_members
from mtkit.attention.contract import Site
from mtkit.attention.kernels.chunks import attend_to_chosen
from mtkit.attention.kernels.dot_product import attend, expand_heads, safe_softmax, scores_of, weighted
from mtkit.attention.kernels.reproducible import replay_choice, with_recorded_choices
from mtkit.attention.options import Positive

BLOCKS = 4, 32
"""Least and most queries of a cluster that share one copy of its keys; between them, the average cluster size."""
AT_ONCE = 1 << 20
"""Cluster weights computed at a time, for a few heads; the backward pass computes them again."""


class ImprovedClustered(ClusteredQueries):
    """Attention of the mean query of each cluster, made exact at the keys with the largest weights.

    clusters: largest number of clusters per head. cluster_bits: bits in the code of a query. cluster_iters: iterations
    of k-means over the codes. cluster_hash_bias: whether the planes that give the bits are moved off the origin, so
    that the length of a query counts too. cluster_topk: number of keys per cluster for which each query computes its
    own weight.
    """

    complexity = "O(T (C + k))"
    small: ClassVar[dict[str, Any]] = {"clusters": 4, "cluster_bits": 8, "cluster_iters": 3, "cluster_topk": 3}

    def __init__(
        self,
        site: Site,
        *,
        clusters: Positive = 100,
        cluster_bits: Bits = 63,
        cluster_iters: Iterations = 10,
        cluster_hash_bias: bool = True,
        cluster_topk: Positive = 32,
    ) -> None:
        super().__init__(
            site,
            clusters=clusters,
            cluster_bits=cluster_bits,
            cluster_iters=cluster_iters,
            cluster_hash_bias=cluster_hash_bias,
        )
        self.topk = cluster_topk

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        if k.shape[2] <= self.topk:
            return attend(q.type_as(v), k.type_as(v), v, scale=self.scale, valid=valid, dropout=self.dropout)[0]
        means, groups = self.clustered(q, valid)
        heads_at_once = max(AT_ONCE // (len(means) * means.shape[2] * q.shape[2]), 1)
        rows = means, groups, q, expand_heads(k, self.site.heads), expand_heads(v, self.site.heads)
        parts = zip(*(x.split(heads_at_once, 1) for x in rows), strict=True)
        heads = [checkpoint(with_recorded_choices(self._of_heads), *part, valid, use_reentrant=False) for part in parts]
        return torch.cat(heads, 1)

    def _of_heads(self, means: Tensor, groups: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return the outputs of a few heads, given the mean query of each cluster and the cluster of each query."""
        seen = None if valid is None else valid[:, None, None]
        with torch.autocast(q.device.type, enabled=False):
            scores = scores_of(means, k, self.scale)  # (B, h, C, T)
        weights = safe_softmax(scores, seen)
        shown = scores.detach() if seen is None else scores.detach().masked_fill(~seen, -torch.inf)
        top = replay_choice(shown.topk(self.topk, sorted=False).indices, k.shape[2])
        there = torch.ones_like(top, dtype=torch.bool) if seen is None else seen.expand_as(scores).gather(-1, top)
        mass = weights.gather(-1, top).sum(-1, keepdim=True)
        rest = (F.dropout(weights, self.dropout) if self.dropout else weights).scatter(-1, top, 0.0)
        window = min(max(q.shape[2] // means.shape[2], BLOCKS[0]), BLOCKS[1])
        how: dict[str, Any] = {"window": window, "scale": self.scale, "dropout": self.dropout}
        exact = attend_to_chosen(q.type_as(v), k.type_as(v), v, groups, top, there, **how)
        return of_members(mass.type_as(v), groups) * exact + of_members(weighted(rest, v), groups)

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        weights = (k @ mean * self.scale).softmax(-1)
        top = weights.topk(min(self.topk, len(k))).indices
        exact = (k[top] @ q * self.scale).softmax(-1)
        return weights.scatter(0, top, weights[top].sum() * exact)
