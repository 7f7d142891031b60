"""Improved clustered: as clustered, but each query weighs the keys that matter most to its cluster by itself.

Paper: Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", NeurIPS 2020, arXiv 2007.04825,
section 3.3. With A^c the weights of the mean query of cluster c, top_c the k keys of most weight in it and m_c the sum
of their weights, query i of cluster c has the weights
    w_ij = m_c softmax over top_c of (q_i . k_j / sqrt(K))   for j in top_c,   w_ij = A^c_j for all others.
Departures: those of `clustered`.
Up to k tokens are all in top_c, and the result is that of `full`, which is then computed directly.
Dropout acts on the weights within top_c, of each query, and on A^c, of each cluster.
Cost: O(T C (K + bits iterations) + T k K) time, O(T C) memory besides the k keys of each 16 queries of a cluster.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.compressed._clustered_queries import Bits, ClusteredQueries, Iterations, of_members
from mtkit.attention.contract import Site
from mtkit.attention.engines.blocks.chunks import attend_to_chosen
from mtkit.attention.engines.softmax.dot_product import attend, safe_softmax, scores_of, spread, weighted
from mtkit.attention.options import Positive
from mtkit.attention.recomputed import as_first

BLOCK = 16
"""Queries of a cluster that are computed together, with one copy of its keys."""


class ImprovedClustered(ClusteredQueries):
    """Attention of the mean query of each cluster, made exact at the keys of most weight.

    clusters: number of clusters per head, at most. cluster_bits: bits of the code of a query. cluster_iters: iterations
    of k-means over the codes. cluster_hash_bias: whether the planes that give the bits are moved off the origin, so
    that the length of a query counts too. cluster_topk: number of keys per cluster
    that each of its queries weighs by itself.
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
        super().__init__(site, clusters=clusters, bits=cluster_bits, iterations=cluster_iters, bias=cluster_hash_bias)
        self.topk = cluster_topk

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Attention over C mean queries, and of each query over the k best keys of its cluster."""
        if k.shape[2] <= self.topk:
            return attend(q.type_as(v), k.type_as(v), v, scale=self.scale, valid=valid, dropout=self.dropout)[0]
        means, groups = self.clustered(q, valid)
        seen = None if valid is None else valid[:, None, None]
        with torch.autocast(q.device.type, enabled=False):
            scores = scores_of(means, k, self.scale)  # (B, H, C, T)
        weights = safe_softmax(scores, seen)
        shown = scores.detach() if seen is None else scores.detach().masked_fill(~seen, -torch.inf)
        top = as_first(shown.topk(self.topk, sorted=False).indices, k.shape[2])
        there = torch.ones_like(top, dtype=torch.bool) if seen is None else seen.expand_as(scores).gather(-1, top)
        mass = weights.gather(-1, top).sum(-1, keepdim=True)
        rest = (F.dropout(weights, self.dropout) if self.dropout else weights).scatter(-1, top, 0.0)
        keys, values = (spread(x.type_as(v), self.site.heads) for x in (k, v))
        how: dict[str, Any] = {"window": BLOCK, "scale": self.scale, "dropout": self.dropout}
        exact = attend_to_chosen(q.type_as(v), keys, values, groups, top, there, **how)
        return of_members(mass.type_as(v), groups) * exact + of_members(weighted(rest, v), groups)

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        """Those of the cluster, shared out anew among the keys of most weight."""
        weights = (k @ mean * self.scale).softmax(-1)
        top = weights.topk(min(self.topk, len(k))).indices
        own = (k[top] @ q * self.scale).softmax(-1)
        return weights.scatter(0, top, weights[top].sum() * own)
