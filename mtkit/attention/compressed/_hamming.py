"""Clusters of queries: k-means over the signs of random projections, under the Hamming distance.

The code of a query has a bit for each plane, 1 where a . q > bias. Codes of +1 and -1 differ in (bits - u . w) / 2
places, so that a matrix product finds the nearest centroid. The products are of small whole numbers, and exact: the
clusters of a segment are the same in any batch.

The first centroids are the codes of evenly spaced real tokens, and there are no more than these. A centroid becomes the
majority of its members bit by bit; an even bit stays as it was, and so does every bit of a centroid without members.
"""

import torch
from torch import Tensor, nn

from mtkit.attention.contract import ROLES, Site
from mtkit.attention.hashing import random_key
from mtkit.device import to_device

AT_ONCE = 1024
"""Positions whose codes are compared at once."""


class HammingClusters(nn.Module):
    """The planes of each head, and the clusters they give.

    Evaluation takes the planes drawn first; training those of the last update.
    """

    planes: Tensor
    training_planes: Tensor

    def __init__(
        self, site: Site, heads: int, width: int, *, clusters: int, bits: int, iterations: int, bias: bool
    ) -> None:
        """`width` is that of a query; with `bias` planes are moved off the origin."""
        super().__init__()
        self.site, self.clusters, self.bits, self.iterations, self.bias = site, clusters, bits, iterations, bias
        self.shape = heads, width + 1, bits
        self.register_buffer("planes", self._drawn(update=0))
        self.register_buffer("training_planes", self._drawn(update=0))

    def redraw(self, update: int) -> None:
        """Draws the planes of training after that many updates."""
        self.training_planes.copy_(to_device(self._drawn(update), self.training_planes.device))

    @torch.no_grad()
    def forward(self, q: Tensor, valid: Tensor | None) -> Tensor:
        """The cluster (B, H, T) of each query (B, H, T, K) in float32 at least, below `count(T)`, which padding has."""
        count = self.count(q.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            codes = 2 * self.codes(q).type_as(q) - 1
            number = torch.arange(count, device=q.device)
            # as many centroids as a segment has tokens, at most, and one at least
            real = number.new_full((1, 1, 1), q.shape[2]) if valid is None else valid.sum(-1).view(-1, 1, 1)
            used = real.clamp(1, count)  # (B or 1, 1, 1)
            centroids = codes.take_along_dim((number * real // used).view(-1, 1, count, 1), 2)
            groups = self._nearest(codes, centroids, number < used, valid)
            for _ in range(self.iterations - 1):
                sums = summed(codes, groups, count)
                centroids = torch.where(sums == 0, centroids, sums.sign())
                groups = self._nearest(codes, centroids, number < used, valid)
        return groups

    def count(self, length: int) -> int:
        """How many clusters T queries can have."""
        return min(self.clusters, length)

    def codes(self, q: Tensor) -> Tensor:
        """The bits (B, H, T, bits) of queries (B, H, T, K)."""
        planes = (self.training_planes if self.training else self.planes).type_as(q)
        return q @ planes[:, :-1] > planes[:, -1:]

    def _nearest(self, codes: Tensor, centroids: Tensor, used: Tensor, valid: Tensor | None) -> Tensor:
        """The cluster (B, H, T) of each code (B, H, T, bits), the first of equals; used (B or 1, 1, C)."""
        parts = []
        for part in codes.split(AT_ONCE, 2):
            alike = part @ centroids.transpose(-1, -2)  # (B, H, t, C)
            if valid is not None:
                alike.masked_fill_(~used.unsqueeze(1), -torch.inf)
            parts.append(alike.max(-1).indices)  # faster than `argmax`; the first of equals as well
        nearest = torch.cat(parts, 2)
        return nearest if valid is None else nearest.masked_fill(~valid.unsqueeze(1), centroids.shape[2])

    def naive(self, codes: Tensor) -> list[int]:
        """The clusters of one head of one segment from its bits (n, bits), a whole number for each code."""
        whole = [int("".join(map(str, bits)), 2) for bits in codes.int().tolist()]
        count = self.count(len(whole))
        centroids = [whole[number * len(whole) // count] for number in range(count)]
        groups: list[int] = []
        for _ in range(self.iterations):
            groups = [min(range(count), key=lambda c: (code ^ centroids[c]).bit_count()) for code in whole]
            for c, old in enumerate(centroids):
                members = [code for code, group in zip(whole, groups, strict=True) if group == c]
                centroids[c] = 0
                for bit in range(self.bits):
                    balance = sum(2 * (code >> bit & 1) - 1 for code in members)
                    centroids[c] |= (balance > 0 if balance else old >> bit & 1) << bit
        return groups

    def _drawn(self, update: int) -> Tensor:
        """Planes after that many updates, (H, K + 1, bits) with the bias as the last row."""
        key = random_key(self.site.seed, ROLES.index(self.site.role), self.site.layer, update)
        planes = torch.randn(self.shape, generator=torch.Generator().manual_seed(key))
        if not self.bias:
            planes[:, -1] = 0.0
        return planes


def cluster_means(x: Tensor, groups: Tensor, count: int) -> Tensor:
    """The mean (B, H, count, K) over each cluster of x (B, H, T, K) in float32 at least, zero over no members."""
    members = summed(x.new_ones(1, 1, x.shape[2], 1), groups, count)
    with torch.autocast(x.device.type, enabled=False):
        return summed(x, groups, count) / members.clamp(min=1)


def summed(x: Tensor, groups: Tensor, count: int) -> Tensor:
    """The sum (B, H, count, K) over each cluster of x (B, H, T, K)."""
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type != "cpu":  # where sums by index come in any order
            member = (groups.unsqueeze(2) == torch.arange(count, device=x.device).unsqueeze(-1)).type_as(x)
            return member @ x
        rows = groups.shape[:2].numel()
        place = groups.flatten(0, 1) + torch.arange(rows).unsqueeze(-1) * (count + 1)  # with one more for padding
        x = x.expand(*groups.shape, -1).flatten(0, 2)
        sums = x.new_zeros(rows * (count + 1), x.shape[-1]).index_add(0, place.flatten(), x)
        return sums.view(*groups.shape[:2], count + 1, -1)[:, :, :count]
