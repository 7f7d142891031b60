"""Clustered: queries are clustered by their hashes, and attention is computed once for each cluster, for its mean.

Paper: Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", NeurIPS 2020, arXiv 2007.04825,
section 3.2. With S_c the queries of cluster c:
    q^c = mean of q_i over S_c,   y_i = softmax(q^c K^T / sqrt(K)) V for i in S_c.
Departures: centroids start from the codes of evenly spaced tokens, not of random ones, and one that has no members
keeps its code; so a segment has the same clusters at every evaluation and in any batch. Heads have planes of their own.
There is no decoder role, and no cross role, because the mean is over later target positions too.
Dropout acts on the weights of a cluster, and so on all its queries alike. Each update of training draws new planes;
evaluation always uses the first ones. Queries are projected in float32, under autocast too.
Cost: O(T C (K + bits iterations)) time, O(T C) memory. Segments of up to C tokens have a cluster for each code.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.compressed._hamming import HammingClusters, cluster_means
from mtkit.attention.contract import Attended, Site
from mtkit.attention.engines.blocks.block_layout import rows_at
from mtkit.attention.engines.heads.head_attention import HeadAttention
from mtkit.attention.engines.softmax.dot_product import attend, spread, widened
from mtkit.attention.options import Positive, Within
from mtkit.attention.recomputed import as_first

Bits = Annotated[int, Within(1, 4096)]
Iterations = Annotated[int, Within(1, 1000)]


class Clustered(HeadAttention):
    """Attention of the mean query of each cluster, for all queries in it.

    clusters: number of clusters per head, at most. cluster_bits: bits of the code of a query. cluster_iters: iterations
    of k-means over the codes. cluster_hash_bias: whether the planes that give the bits are moved off the origin, so
    that the length of a query counts too.
    """

    roles = frozenset({"encoder"})
    published = frozenset({"encoder"})
    paper = "Vyas et al. 2020, arXiv 2007.04825"
    complexity = "O(T C)"
    growth = 1
    unrounded = True
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "positions": frozenset({"rotary"}),  # the others add to scores by the distance of a query, not of a mean
        "projection": None,
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }
    small: ClassVar[dict[str, Any]] = {"clusters": 4, "cluster_bits": 8, "cluster_iters": 3}

    def __init__(
        self,
        site: Site,
        *,
        clusters: Positive = 100,
        cluster_bits: Bits = 63,
        cluster_iters: Iterations = 10,
        cluster_hash_bias: bool = True,
    ) -> None:
        super().__init__(site)
        self.clusters = HammingClusters(
            site,
            site.heads,
            self.projection.key_width,
            clusters=clusters,
            bits=cluster_bits,
            iterations=cluster_iters,
            bias=cluster_hash_bias,
        )

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
        """Attention over C mean queries, whose outputs go to all members of their clusters."""
        q, k, v = self._projected(query)
        heads = self._attend(q, k, v, query_valid)
        return Attended(self.joined(heads), losses=self.losses(heads, v, None, query_valid))

    def after_update(self, update: int, total_updates: int) -> None:
        """Draws new planes for training."""
        super().after_update(update, total_updates)
        self.clusters.redraw(update)

    def naive(
        self, query: Tensor, memory: Tensor | None = None, *, query_valid: Tensor | None = None, **_: Any
    ) -> Attended:
        """The same query by query: codes as whole numbers, clusters and means by lists, a softmax for each query."""
        q, k, v = self._projected(query)
        k, v = spread(k, self.site.heads), spread(v, self.site.heads)
        codes = self.clusters.codes(q)
        rows = []
        for b, length in enumerate(
            [query.shape[1]] * len(query) if query_valid is None else query_valid.sum(1).tolist()
        ):
            for h in range(self.site.heads):
                groups = self.clusters.naive(codes[b, h, :length]) if length else []
                row = [v.new_zeros(v.shape[-1])] * query.shape[1]
                for i, group in enumerate(groups):
                    mean = torch.stack([q[b, h, j] for j in range(length) if groups[j] == group]).mean(0)
                    row[i] = self._weights(q[b, h, i], mean, k[b, h, :length]) @ v[b, h, :length]
                rows.append(torch.stack(row))
        return Attended(self.joined(torch.stack(rows).unflatten(0, (len(query), -1))))

    def _weights(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        """The weights (n,) of one query (K,) in a cluster of this mean (K,), over keys (n, K)."""
        return (k @ mean * self.scale).softmax(-1)

    def _projected(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys in float32 at least, and values."""
        v = self.projection.values(self.v_proj(query))
        with torch.autocast(query.device.type, enabled=False):  # rounding must not move a query to another cluster
            exact = query.type_as(self.q_proj.weight)
            q, k = self.queries(exact), self._rotated(self.projection.keys(self.k_proj(exact)), None)
        return widened(q), widened(k), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """The heads' outputs (B, H, T, V)."""
        means, groups = self._clustered(q, valid)
        heads, _ = attend(means.type_as(v), k.type_as(v), v, scale=self.scale, valid=valid, dropout=self.dropout)
        return of_members(heads, groups)

    def _clustered(self, q: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean queries (B, H, C, K), and the cluster of each query (B, H, T), C at padding."""
        count = self.clusters.count(q.shape[2])
        groups = as_first(self.clusters(q.detach(), valid), count + 1)
        return cluster_means(q, groups, count), groups


def of_members(rows: Tensor, groups: Tensor) -> Tensor:
    """Rows (B, H, T, X) of the clusters that queries are in, from those of all clusters (B, H, C, X)."""
    return rows_at(rows, groups.clamp(max=rows.shape[2] - 1).unsqueeze(2)).squeeze(2)
