"""Clustered: queries are clustered by their hashes, and attention is computed once per cluster, for its mean query.

Paper: Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", NeurIPS 2020, arXiv 2007.04825,
section 3.2. With S_c the queries of cluster c:
    q^c = mean of q_i over S_c,   y_i = softmax(q^c K^T / sqrt(K)) V for i in S_c.
The code of a query has one bit per random plane; k-means clusters the codes by Hamming distance.
Departures: centroids start from the codes of evenly spaced real tokens, not of random ones, and a centroid without
members keeps its code; so a segment has the same clusters at every evaluation and in any batch. Each head has its own
planes. There is no decoder role and no cross role, because the mean would include later target positions.
Dropout acts on the weights of a cluster, so on all its queries alike. Each training update draws new planes;
evaluation always uses the first ones. Queries and keys are projected in float32, under autocast too, so that rounding
changes no cluster.
Cost: O(T C (K + bits iterations)) time, O(T C) memory. Segments of up to C tokens have one cluster per distinct code.
"""

from typing import Any, ClassVar

from torch import Tensor

from mtkit.attention.compressed._clustered_queries import ClusteredQueries, of_members
from mtkit.attention.kernels.dot_product import attend


class Clustered(ClusteredQueries):
    """Attention of the mean query of each cluster, for all queries in it.

    clusters: largest number of clusters per head. cluster_bits: bits in the code of a query. cluster_iters: iterations
    of k-means over the codes. cluster_hash_bias: whether the planes that give the bits are moved off the origin, so
    that the length of a query counts too.
    """

    complexity = "O(T C)"
    small: ClassVar[dict[str, Any]] = {"clusters": 4, "cluster_bits": 8, "cluster_iters": 3}

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        means, groups = self.clustered(q, valid)
        heads, _ = attend(means.type_as(v), k.type_as(v), v, scale=self.scale, valid=valid, dropout=self.dropout)
        return of_members(heads, groups)

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        return (k @ mean * self.scale).softmax(-1)
