"""Clusters of tokens: centroids that follow the vectors assigned to them, and lists of each cluster's latest members.

Centroids are moving statistics in buffers, not trained weights. They are updated as in Roy et al., 2020 (arXiv
2003.05997): a moving sum of vectors over a smoothed moving count. A decoding step reads the tokens of its cluster, or
of its hash bucket, from the lists.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from mtkit.attention.contract import State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import replay_choice

SMOOTHING = 1e-5
LEAST_MASS = 1e-3
"""A centroid with a smaller moving count of vectors does not move."""


class Centroids(nn.Module):
    """C centroids (H, C, K) for each of H heads; all calls take vectors (B, H, T, K)."""

    mean: Tensor
    total: Tensor
    mass: Tensor
    new_total: Tensor
    new_mass: Tensor

    def __init__(self, heads: int, clusters: int, width: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        mean = F.layer_norm(torch.randn(heads, clusters, width), (width,))
        self.register_buffer("mean", mean)
        self.register_buffer("total", mean.clone())
        self.register_buffer("mass", torch.ones(heads, clusters))
        # zero after an update, when checkpoints are written
        self.register_buffer("new_total", torch.zeros_like(mean), persistent=False)
        self.register_buffer("new_mass", torch.zeros(heads, clusters), persistent=False)

    def scores(self, x: Tensor) -> Tensor:
        """Return products (B, H, T, C) with the centroids, in float32 or wider."""
        with torch.autocast(x.device.type, enabled=False):
            x = upcast(x)
            # (H, B T, K): all vectors of a head meet its centroids in one product
            products = x.transpose(0, 1).flatten(1, 2) @ self.mean.to(x.dtype).mT
            return products.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)

    def nearest(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the centroid (B, H, T) with the largest product for each vector; C at padding, valid (B, T)."""
        cluster = self.scores(x).argmax(-1)
        return cluster if valid is None else cluster.masked_fill(~valid.unsqueeze(1), self.mean.shape[1])

    def best(self, x: Tensor, most: int, valid: Tensor | None, *, only_nearest: bool = False) -> tuple[Tensor, Tensor]:
        """Return the positions (B, H, C, most) of the largest products with each centroid, and which exist.

        Padding is left out; with `only_nearest` also vectors that are nearer to another centroid. Equal products are
        ordered by position, because the choice of `topk` depends on the width of the batch.
        """
        scores = self.scores(x.detach())
        if only_nearest:
            nearest = F.one_hot(scores.argmax(-1), scores.shape[-1]).bool()
            scores = scores.masked_fill(~nearest, float("-inf"))
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, :, None], float("-inf"))
        values, position = (x[:, :, :most] for x in scores.sort(dim=2, descending=True, stable=True))
        return position.transpose(2, 3), (values > float("-inf")).transpose(2, 3)

    def distance(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return real tokens' mean squared distance to their nearest centroid; centroids get no gradient."""
        mean = self.mean.to(x.dtype).expand(len(x), -1, -1, -1)
        cluster = replay_choice(self.nearest(x.detach()), self.mean.shape[1])
        squares = (x - mean.take_along_dim(cluster.unsqueeze(-1), dim=2)).square().sum(-1)
        if valid is None:
            return squares.mean()
        real = valid.unsqueeze(1).expand_as(squares)
        return squares.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)

    @torch.no_grad()
    def gather(self, x: Tensor, valid: Tensor | None) -> None:
        """In training, add real tokens (B, T) to the sums for the next update.

        A call during a backward pass is ignored: it recomputes activations whose tokens have been added before.
        """
        if not self.training or torch._C._current_graph_task_id() != -1:
            return
        chosen = F.one_hot(self.nearest(x), self.mean.shape[1]).to(self.mean.dtype)
        if valid is not None:
            chosen = chosen * valid[:, None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            self.new_total += torch.einsum("bhtc,bhtk->hck", chosen, x.detach().to(chosen.dtype))
        self.new_mass += chosen.sum((0, 2))

    @torch.no_grad()
    def update(self) -> None:
        """Apply the sums since the last update, added over all processes."""
        new = torch.cat([self.new_total, self.new_mass.unsqueeze(-1)], dim=-1)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(new)
        keep = torch.where(new[..., -1].sum() > 0, self.decay, 1.0)
        self.total.mul_(keep).add_((1 - keep) * new[..., :-1])
        self.mass.mul_(keep).add_((1 - keep) * new[..., -1])
        sums = self.mass.sum(-1, keepdim=True)
        smooth = (self.mass + SMOOTHING) / (sums + self.mass.shape[1] * SMOOTHING) * sums
        moved = self.total / smooth.clamp(min=LEAST_MASS).unsqueeze(-1)
        self.mean.copy_(torch.where(self.mass.unsqueeze(-1) > LEAST_MASS, moved, self.mean))
        self.new_total.zero_()
        self.new_mass.zero_()


def start_lists(batch_size: int, hypotheses: int, heads: int, groups: int, like: Tensor, places: int = 1) -> State:
    """Return empty lists of the latest members of each group, with room for `places` of them."""
    count = torch.zeros(batch_size, hypotheses, heads, groups, dtype=torch.int32, device=like.device)
    return {"members": count.new_zeros(*count.shape, places), "count": count}


def with_places(lists: State, position: int, most: int) -> State:
    """Return the lists with a place for `position` in each; up to `most` places."""
    members = lists["members"]
    room = members.shape[-1]
    if position >= room and room < most:
        wider = members.new_zeros(*members.shape[:-1], min(2 * room, most))
        wider[..., :room] = members
        members = wider
    return {"members": members, "count": lists["count"]}


def enlist(lists: State, group: Tensor, position: int, most: int) -> State:
    """Append `position` to the list of its group (B, N, H); each list keeps its last `most` members."""
    members, count = with_places(lists, position, most).values()
    place = count.take_along_dim(group.unsqueeze(-1), 3) % members.shape[-1]
    groups, places = members.shape[-2:]
    index = group.unsqueeze(-1) * places + place
    members.view(*count.shape[:-1], groups * places).scatter_(3, index, position)
    count.scatter_add_(3, group.unsqueeze(-1), torch.ones_like(index, dtype=count.dtype))
    return {"members": members, "count": count}


def enlisted(lists: State, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's latest members (B, N, H) and their ranks, both (B, N, H, places); rank < 0: no member."""
    members = lists["members"].take_along_dim(group[..., None, None], 3).squeeze(3)
    last = lists["count"].take_along_dim(group.unsqueeze(-1), 3) - 1
    place = torch.arange(members.shape[-1], device=members.device)
    return members.long(), last - (last - place) % members.shape[-1]
