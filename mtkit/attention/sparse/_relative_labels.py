"""Relative position labels: a learned vector and bias of each head for every label that a pair of positions can have.

Paper: Ainslie et al., "ETC", 2020, arXiv 2004.08483, section 3.2; Shaw, Uszkoreit and Vaswani, 2018, arXiv 1803.02155.
"""

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Site
from mtkit.attention.slots import Positions


class RelativeLabels(Positions):
    """Adds scale * (q . a_label + b_label) to the scores, one table of (a, b) for each head.

    Label 0 is the same position, 1 to `clip` a key to the right, clip + 1 to 2 clip one to the left, the last of each
    for all further ones; behind these come two for pairs that do not belong together and pairs that do.
    """

    undecayed = ("biases",)

    def __init__(self, site: Site, width: int, *, clip: int) -> None:
        super().__init__(site, width)
        self.clip = clip
        labels = 2 * clip + 3
        self.vectors = nn.Parameter(0.02 * torch.randn(site.heads, labels, width))
        self.biases = nn.Parameter(torch.zeros(site.heads, labels))

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """(B, H, ..., T, S) by the positions, through one product with the table."""
        label = self.label(query_position, key_position)
        return self.by_label(q, scale).gather(-1, label.expand(*q.shape[:-1], label.shape[-1]))

    def belonging(self, q: Tensor, member: Tensor, scale: float) -> Tensor:
        """(B, H, T, S) by whether query and key belong together: member (T, S)."""
        apart, together = self.by_label(q, scale)[..., -2:].split(1, dim=-1)
        return torch.where(member, together, apart)

    def label(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """(..., T, S) of positions (..., T) and (..., S)."""
        return distance_label(key_position.unsqueeze(-2) - query_position.unsqueeze(-1), self.clip)

    def by_label(self, q: Tensor, scale: float) -> Tensor:
        """What each label adds to a query's score, (B, H, ..., T, labels)."""
        rows = q.flatten(2, -2)  # the heads' tables are the only batch: none is copied for a block
        scores = (rows @ self.vectors.transpose(-1, -2) + self.biases.unsqueeze(-2)) * scale
        return scores.unflatten(2, q.shape[2:-1])


def distance_label(distance: Tensor, clip: int) -> Tensor:
    """The label of a key that lies so far to the right."""
    distance = distance.clamp(-clip, clip)
    return torch.where(distance < 0, clip - distance, distance)
