"""Clustered: queries are clustered by their hashes, and attention is computed once for each cluster, for its mean.

Paper: Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", NeurIPS 2020, arXiv 2007.04825,
section 3.2. With S_c the queries of cluster c:
    q^c = mean of q_i over S_c,   y_i = softmax(q^c K^T / sqrt(K)) V for i in S_c.
Departures: centroids start from the codes of evenly spaced tokens, not of random ones, and one that has no members
keeps its code; so a segment has the same clusters at every evaluation and in any batch. Heads have planes of their own.
There is no decoder role, and no cross role, because the mean is over later target positions too.
Dropout acts on the weights of a cluster, and so on all its queries alike. Each update of training draws new planes;
evaluation always uses the first ones. Queries and keys are projected in float32, under autocast too.
Cost: O(T C (K + bits iterations)) time, O(T C) memory. Segments of up to C tokens have a cluster for each code.
"""

from typing import Any, ClassVar

from torch import Tensor

from mtkit.attention.compressed._clustered_queries import Bits, ClusteredQueries, Iterations, of_members
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.options import Positive


class Clustered(ClusteredQueries):
    """Attention of the mean query of each cluster, for all queries in it.

    clusters: number of clusters per head, at most. cluster_bits: bits of the code of a query. cluster_iters: iterations
    of k-means over the codes. cluster_hash_bias: whether the planes that give the bits are moved off the origin, so
    that the length of a query counts too.
    """

    complexity = "O(T C)"
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
        super().__init__(site, clusters=clusters, bits=cluster_bits, iterations=cluster_iters, bias=cluster_hash_bias)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Attention over C mean queries, whose outputs go to all members of their clusters."""
        means, groups = self.clustered(q, valid)
        heads, _ = attend(means.type_as(v), k.type_as(v), v, scale=self.scale, valid=valid, dropout=self.dropout)
        return of_members(heads, groups)

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        """Those of the mean."""
        return (k @ mean * self.scale).softmax(-1)
