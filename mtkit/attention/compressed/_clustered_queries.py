"""The base of attention by clusters of queries: projections, clusters and their means; a mechanism adds its weights.

Each update of training draws new planes for the codes of queries; evaluation always uses the first ones. Queries and
keys are projected in float32, under autocast too, so that rounding changes no choice.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.compressed._hamming import HammingClusters, cluster_means
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import spread
from mtkit.attention.options import Within
from mtkit.attention.recomputed import as_first

Bits = Annotated[int, Within(1, 4096)]
Iterations = Annotated[int, Within(1, 1000)]


class ClusteredQueries(HeadAttention):
    """Attention whose weights are made for clusters of queries, in the encoder role."""

    roles = frozenset({"encoder"})
    published = frozenset({"encoder"})
    paper = "Vyas et al. 2020, arXiv 2007.04825"
    growth = 1
    unrounded = True
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "positions": frozenset({"rotary"}),  # the others add to scores by the distance of a query, not of a mean
        "projection": None,
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }

    def __init__(self, site: Site, *, clusters: int, bits: int, iterations: int, bias: bool) -> None:
        super().__init__(site)
        width = self.projection.key_width
        self.clusters = HammingClusters(
            site, site.heads, width, clusters=clusters, bits=bits, iterations=iterations, bias=bias
        )

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """The heads' outputs (B, H, T, V); q and k are in float32 at least."""
        raise NotImplementedError

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        """The weights (n,) of one query (K,) in a cluster of this mean (K,), over keys (n, K)."""
        raise NotImplementedError

    def attend(self, inputs: Inputs) -> Attended:
        """Attention by clusters, which padding is not in."""
        q, k, v = self.exact_queries_keys_values(inputs.query)
        heads = self.attended(q, k, v, inputs.query_valid)
        return Attended(self.joined(heads), losses=self.losses(heads, v, None, inputs.query_valid))

    def after_update(self, update: int, total_updates: int) -> None:
        """Draws new planes for training."""
        super().after_update(update, total_updates)
        self.clusters.redraw(update)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same query by query: codes as whole numbers, clusters and means by lists, a softmax for each query."""
        query = inputs.query
        q, k, v = self.exact_queries_keys_values(query)
        k, v = spread(k, self.site.heads), spread(v, self.site.heads)
        codes = self.clusters.codes(q)
        lengths = [query.shape[1]] * len(query) if inputs.query_valid is None else inputs.query_valid.sum(1).tolist()
        rows = []
        for b, length in enumerate(lengths):
            for h in range(self.site.heads):
                groups = self.clusters.naive(codes[b, h, :length]) if length else []
                row = [v.new_zeros(v.shape[-1])] * query.shape[1]
                for i, group in enumerate(groups):
                    mean = torch.stack([q[b, h, j] for j in range(length) if groups[j] == group]).mean(0)
                    row[i] = self.weights_of(q[b, h, i], mean, k[b, h, :length]) @ v[b, h, :length]
                rows.append(torch.stack(row))
        return Attended(self.joined(torch.stack(rows).unflatten(0, (len(query), -1))))

    def clustered(self, q: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean queries (B, H, C, K), and the cluster of each query (B, H, T), C at padding."""
        count = self.clusters.count(q.shape[2])
        groups = as_first(self.clusters(q.detach(), valid), count + 1)
        return cluster_means(q, groups, count), groups


def of_members(rows: Tensor, groups: Tensor) -> Tensor:
    """Rows (B, H, T, X) of the clusters that queries are in, from those of all clusters (B, H, C, X)."""
    return rows_at(rows, groups.clamp(max=rows.shape[2] - 1).unsqueeze(2)).squeeze(2)
