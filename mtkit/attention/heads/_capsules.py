"""Base of merges by routing: heads vote for capsules, token by token."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import refused
from mtkit.attention.slots import Merge


class Capsules(Merge):
    """N capsules of width P from the votes of the heads, in at least float32; a mechanism adds the routing.

    N must divide the joint width of the heads.
    """

    paper: ClassVar[str]

    def __init__(self, site: Site, width: int, capsules: int) -> None:
        super().__init__(site, width)
        total = site.heads * width
        if total % capsules:
            raise refused("capsules", capsules, f"divide the heads' joint width {total}")
        self.capsules = capsules
        self.votes = nn.Parameter(torch.empty(site.heads, width, total))
        nn.init.xavier_uniform_(self.votes.view(total, total))

    def forward(self, heads: Tensor, query: Tensor | None = None) -> Tensor:
        """Map (B, H, T, V) to (B, T, N * P); the query is not read."""
        with torch.autocast(heads.device.type, enabled=False):
            rows = upcast(heads).transpose(0, 1).flatten(1, 2)  # (H, R, V) of R = B T tokens
            votes = torch.bmm(upcast(self.votes).mT, rows.mT)  # (H, N * P, R): tokens last, so memory is contiguous
            routed = self.routed(votes.unflatten(1, (self.capsules, -1)))
        return routed.flatten(0, 1).mT.contiguous().unflatten(0, (len(heads), heads.shape[2])).type_as(heads)

    def routed(self, votes: Tensor) -> Tensor:
        """Return the capsules (N, P, R) of R tokens from the heads' votes (H, N, P, R)."""
        raise NotImplementedError
