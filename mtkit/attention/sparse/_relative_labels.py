"""Relative position labels of `etc`: scores by the clipped distance of two positions, or by belonging together.

`token_lists` has the labels of all pairs that tokens see.
"""

import torch
from torch import Tensor, nn

from mtkit.attention.kernels.listed import Lists, smallest_type
from mtkit.recording import kept

SHORTEST_BLOCK, LONGEST_BLOCK = 16, 64
"""Tokens that share a list of keys: longer blocks waste products, shorter ones copies of keys."""


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

    @property
    def biases_by_distance(self) -> Tensor:
        """The biases (H, 2 clip + 1) of distances from -clip to clip."""
        right, left = self.biases[:, : self.clip + 1], self.biases[:, self.clip + 1 : 2 * self.clip + 1]
        return torch.cat([left.flip(1), right], 1)

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


@kept(4)  # one to four bytes for each listed pair
def token_lists(
    length: int, nodes: int, radius: int, members: int, *, clip: int, hard: bool, device: torch.device
) -> Lists:
    """List the keys of each token block: the band, then all nodes, which are numbered after the tokens.

    Labels are as in `RelativeLabels`, or all 0 if clip is 0. The result is cached for all layers: it depends only on
    the arguments.
    """
    blocks = -(-length // min(max(radius, SHORTEST_BLOCK), LONGEST_BLOCK))
    block = -(-length // blocks)  # equal blocks
    width = min(block + 2 * radius, length)
    start = torch.arange(0, length, block, device=device).unsqueeze(-1)
    i = (start + torch.arange(block, device=device)).unsqueeze(-1)  # (blocks, block, 1)
    near = (start - radius).clamp(0, length - width) + torch.arange(width, device=device)
    node = torch.arange(nodes, device=device)
    distance = near.unsqueeze(1) - i
    member = (i // members).clamp(max=nodes - 1) == node
    outside = 2 * clip + 1 if clip else 0
    hidden = outside + (2 if clip else 1)
    to_tokens = torch.where(distance.abs() <= radius, distance_label(distance, clip), hidden)
    to_nodes = torch.where(member, outside + (clip > 0), hidden if hard else outside)
    labels = torch.cat([to_tokens, to_nodes], dim=-1)
    return Lists(torch.cat([near, length + node.expand(len(near), -1)], dim=-1), labels.to(smallest_type(hidden)))
