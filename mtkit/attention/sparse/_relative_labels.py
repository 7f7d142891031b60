"""Relative position labels of `etc`: scores by the clipped distance of two positions, or by belonging together."""

import torch
from torch import Tensor, nn


class RelativeLabels(nn.Module):
    """Relative position labels: adds scale * (q . a_label + b_label) to scores, with a table of (a, b) per head.

    Label 0 is the same position, labels 1 to `clip` are keys to the right, clip + 1 to 2 clip keys to the left; the
    last label of each side also covers greater distances. The last two labels are for a token outside and inside a
    node's block. Paper: section 3.2; Shaw, Uszkoreit and Vaswani, 2018, arXiv 1803.02155.
    """

    undecayed = ("biases",)

    def __init__(self, heads: int, width: int, *, clip: int) -> None:
        super().__init__()
        self.clip = clip
        labels = 2 * clip + 3
        self.vectors = nn.Parameter(0.02 * torch.randn(heads, labels, width))
        self.biases = nn.Parameter(torch.zeros(heads, labels))

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """Return the bias (B, H, ..., T, S) by positions (..., T) and (..., S), with one product of q and the table."""
        label = distance_label(key_position.unsqueeze(-2) - query_position.unsqueeze(-1), self.clip)
        return self.by_label(q, scale).gather(-1, label.expand(*q.shape[:-1], label.shape[-1]))

    def belonging(self, q: Tensor, member: Tensor, scale: float) -> Tensor:
        """Return the bias (B, H, T, S) by membership (B or 1, 1, T, S): whether token and node belong together."""
        apart, together = self.by_label(q, scale)[..., -2:].split(1, dim=-1)
        return torch.where(member, together, apart)

    def by_label(self, q: Tensor, scale: float) -> Tensor:
        """Return what each label adds to a query's score, (B, H, ..., T, labels)."""
        rows = q.flatten(2, -2)  # the batch is the heads alone, so that no table is copied for a block
        scores = (rows @ self.vectors.transpose(-1, -2) + self.biases.unsqueeze(-2)) * scale
        return scores.unflatten(2, q.shape[2:-1])


def distance_label(distance: Tensor, clip: int) -> Tensor:
    """Return the labels of keys at these distances to the right."""
    distance = distance.clamp(-clip, clip)
    return torch.where(distance < 0, clip - distance, distance)
