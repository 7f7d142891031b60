"""Base of attention by clusters of queries: projections, clusters and cluster means; a mechanism adds its weights.

The code of a query has one bit per random plane a, 1 if a . q > bias. K-means clusters the codes by Hamming distance:
a centroid becomes the majority of its members bit by bit; a tied bit keeps its value, and so does a centroid without
members. The first centroids are the codes of evenly spaced real tokens, at most one per token. Each training update
draws new planes; evaluation always uses the first ones. Queries and keys are projected in float32, under autocast too,
so that rounding changes no cluster.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import ROLES, Attended, Inputs, Site, packing
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import expand_heads
from mtkit.attention.kernels.reproducible import random_key, replay_choice
from mtkit.attention.options import Positive, Within
from mtkit.attention.slots import combining
from mtkit.device import to_device

Bits = Annotated[int, Within(1, 4096)]
Iterations = Annotated[int, Within(1, 1000)]

AT_ONCE = 1024
"""Positions whose codes are compared at once."""


class ClusteredQueries(HeadAttention):
    """Attention whose weights are computed per cluster of queries, in the encoder role; the options of `clustered`."""

    roles = published = frozenset({"encoder"})
    paper = "Vyas et al. 2020, arXiv 2007.04825"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    unrounded = True
    # other positions add to scores by the distance of one query, not of a mean
    slots = combining("projection", "merge", "nearby", positions={"rotary"}, regularizer={"disagreement"})

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
            site, self.projection.key_width, clusters, cluster_bits, cluster_iters, cluster_hash_bias
        )

    def attend(self, inputs: Inputs) -> Attended:
        """Attend through the clusters of real tokens; padding is in no cluster."""
        q, k, v = self.exact_queries_keys_values(inputs.query)
        heads = self.attended(q, k, v, inputs.query_valid)
        return self.result(inputs, heads, v)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return the heads' outputs (B, H, T, V); q and k are at least float32."""
        raise NotImplementedError

    def clustered(self, q: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean queries (B, H, C, K) and the cluster of each query (B, H, T), C at padding."""
        count = self.clusters.count(q.shape[2])
        groups = replay_choice(self.clusters(q.detach(), valid), count + 1)
        return cluster_means(q, groups, count), groups

    def weights_of(self, q: Tensor, mean: Tensor, k: Tensor) -> Tensor:
        """Return the weights (n,) of one query (K,) in a cluster with this mean (K,), over keys (n, K)."""
        raise NotImplementedError

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        self.clusters.redraw(update)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        q, k, v = self.exact_queries_keys_values(query)
        k, v = expand_heads(k, self.site.heads), expand_heads(v, self.site.heads)
        codes = self.clusters.codes(q)
        lengths = [query.shape[1]] * len(query) if inputs.query_valid is None else inputs.query_valid.sum(1).tolist()
        rows = []
        for b, length in enumerate(lengths):
            for h in range(self.site.heads):
                groups = self.clusters.naive(codes[b, h, :length]) if length else []
                row = [v.new_zeros(v.shape[-1])] * query.shape[1]
                for i, group in enumerate(groups):
                    mean = q[b, h, [j for j in range(length) if groups[j] == group]].mean(0)
                    row[i] = self.weights_of(q[b, h, i], mean, k[b, h, :length]) @ v[b, h, :length]
                rows.append(torch.stack(row))
        return Attended(self.merge_heads(torch.stack(rows).unflatten(0, (len(query), -1)), query))


class HammingClusters(nn.Module):
    """K-means over the signs of random projections of each head's queries (B, H, T, K).

    Codes of +1 and -1 differ in (bits - u . w) / 2 places, so a matrix product finds the nearest centroid. The products
    are small whole numbers and exact: the clusters of a segment are the same in any batch. Evaluation uses the planes
    drawn first; training uses the planes of the last `redraw`.
    """

    planes: Tensor
    training_planes: Tensor

    def __init__(self, site: Site, width: int, clusters: int, bits: int, iterations: int, bias: bool) -> None:
        """`width` is K; with `bias` planes are moved off the origin."""
        super().__init__()
        self.site, self.clusters, self.bits, self.iterations, self.bias = site, clusters, bits, iterations, bias
        self.shape = site.heads, width + 1, bits
        self.register_buffer("planes", self._drawn(update=0))
        self.register_buffer("training_planes", self._drawn(update=0))

    def redraw(self, update: int) -> None:
        """Draw the training planes that belong to this number of updates."""
        self.training_planes.copy_(to_device(self._drawn(update), self.training_planes.device))

    @torch.no_grad()
    def forward(self, q: Tensor, valid: Tensor | None) -> Tensor:
        """Return the cluster (B, H, T) of each query, below `count(T)`; padding has `count(T)`."""
        count = self.count(q.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            codes = 2 * self.codes(q).type_as(q) - 1
            number = torch.arange(count, device=q.device)
            # at least one centroid, and no more than the segment has tokens
            real = number.new_full((1, 1, 1), q.shape[2]) if valid is None else valid.sum(-1).view(-1, 1, 1)
            used = real.clamp(1, count)  # (B or 1, 1, 1)
            centroids = codes.take_along_dim((number * real // used).view(-1, 1, count, 1), 2)
            groups = self._nearest(codes, centroids, number < used, valid)
            for _ in range(self.iterations - 1):
                sums = cluster_sums(codes, groups, count)
                centroids = torch.where(sums == 0, centroids, sums.sign())
                groups = self._nearest(codes, centroids, number < used, valid)
        return groups

    def count(self, length: int) -> int:
        """Return how many clusters T queries can have."""
        return min(self.clusters, length)

    def codes(self, q: Tensor) -> Tensor:
        """Return the bits (B, H, T, bits) of queries (B, H, T, K)."""
        planes = (self.training_planes if self.training else self.planes).type_as(q)
        return q @ planes[:, :-1] > planes[:, -1:]

    def _nearest(self, codes: Tensor, centroids: Tensor, used: Tensor, valid: Tensor | None) -> Tensor:
        """Return the nearest cluster (B, H, T) of each code (B, H, T, bits), of equals the first; used (B, 1, C)."""
        parts = []
        for part in codes.split(AT_ONCE, 2):
            similarity = part @ centroids.transpose(-1, -2)  # (B, H, t, C)
            if valid is not None:
                similarity.masked_fill_(~used.unsqueeze(1), -torch.inf)
            parts.append(similarity.max(-1).indices)  # faster than `argmax`, and also returns the first of equals
        nearest = torch.cat(parts, 2)
        return nearest if valid is None else nearest.masked_fill(~valid.unsqueeze(1), centroids.shape[2])

    def naive(self, codes: Tensor) -> list[int]:
        """Return the clusters of one head in one segment from its bits (n, bits), with codes as whole numbers."""
        numbers = [int("".join(map(str, bits)), 2) for bits in codes.int().tolist()]
        count = self.count(len(numbers))
        centroids = [numbers[c * len(numbers) // count] for c in range(count)]
        groups: list[int] = []
        for _ in range(self.iterations):
            groups = [min(range(count), key=lambda c: (code ^ centroids[c]).bit_count()) for code in numbers]
            for c, old in enumerate(centroids):
                members = [code for code, group in zip(numbers, groups, strict=True) if group == c]
                centroids[c] = 0
                for bit in range(self.bits):
                    balance = sum(2 * (code >> bit & 1) - 1 for code in members)
                    centroids[c] |= (balance > 0 if balance else old >> bit & 1) << bit
        return groups

    def _drawn(self, update: int) -> Tensor:
        """Return the planes (H, K + 1, bits) for this number of updates; the last row is the bias."""
        key = random_key(self.site.seed, ROLES.index(self.site.role), self.site.layer, update)
        planes = torch.randn(self.shape, generator=torch.Generator().manual_seed(key))
        if not self.bias:
            planes[:, -1] = 0.0
        return planes


def of_members(rows: Tensor, groups: Tensor) -> Tensor:
    """Return for each query the row of its cluster, (B, H, T, X), from the clusters' rows (B, H, C, X)."""
    return rows_at(rows, groups.clamp(max=rows.shape[2] - 1).unsqueeze(2)).squeeze(2)


def cluster_means(x: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean (B, H, count, K) of x (B, H, T, K) per cluster, zero without members; x is at least float32."""
    members = cluster_sums(x.new_ones(1, 1, x.shape[2], 1), groups, count)
    with torch.autocast(x.device.type, enabled=False):
        return cluster_sums(x, groups, count) / members.clamp(min=1)


def cluster_sums(x: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the sum (B, H, count, K) of x (B, H, T, K) per cluster."""
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type != "cpu":  # an accelerator adds by index in varying order
            member = (groups.unsqueeze(2) == torch.arange(count, device=x.device).unsqueeze(-1)).type_as(x)
            return member @ x
        rows = groups.shape[:2].numel()
        place = groups.flatten(0, 1) + torch.arange(rows).unsqueeze(-1) * (count + 1)  # one more cluster, for padding
        x = x.expand(*groups.shape, -1).flatten(0, 2)
        sums = x.new_zeros(rows * (count + 1), x.shape[-1]).index_add(0, place.flatten(), x)
        return sums.view(*groups.shape[:2], count + 1, -1)[:, :, :count]
