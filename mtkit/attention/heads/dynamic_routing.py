"""Dynamic routing: capsules are weighted means of the heads' votes, and a head's weight grows if it agrees with them.

Papers: Li, Yang, Dou, Wang, Lyu and Tu, "Information Aggregation for Multi-Head Attention with Routing-by-Agreement",
NAACL 2019, arXiv 1904.03100; Gu and Feng, "Improving Multi-head Attention with Capsule Networks", NLPCC 2019,
arXiv 1909.00188.
Departures: `out_proj` is kept after the capsules, which replace the concatenated heads; the second paper adds the
concatenated heads to them, which is left out here. A capsule is the mean of the votes under their shares, which sum to
1 over the heads; Sabour et al. take the sum.
Cost: the votes take O(T D^2) time, as another `out_proj`, and O(T H D) memory; each iteration takes O(T H D) time.
"""

from typing import Annotated

import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.heads._capsules import Capsules
from mtkit.attention.options import Positive, Within


class DynamicRouting(Capsules):
    """Heads vote for capsules, and each head is divided among the capsules that its votes agree with.

    capsules: number of capsules; must divide the joint width of the heads. iterations: iterations of routing; with one,
    every head has the same share. squash: whether the length n of a capsule becomes n^2 / (1 + n^2), below 1.
    """

    paper = "Li et al. 2019, arXiv 1904.03100"

    def __init__(
        self,
        site: Site,
        width: int,
        *,
        capsules: Positive = 8,
        iterations: Annotated[int, Within(1, 64)] = 3,
        squash: bool = True,
    ) -> None:
        super().__init__(site, width, capsules)
        self.iterations = iterations
        self.squash = squash

    def routed(self, votes: Tensor) -> Tensor:
        agreement = votes.new_zeros(votes.shape[0], votes.shape[1], 1)  # B of head a and capsule n, (H, N, R)
        for iteration in range(self.iterations):
            # each head is divided among the capsules; the softmax over heads is share / sum of shares, even if all
            # shares of a capsule underflow
            within = agreement.log_softmax(1).softmax(0)
            capsules = (within.unsqueeze(2) * votes).sum(0)
            if self.squash:
                capsules = _squashed(capsules)
            if iteration + 1 < self.iterations:
                agreement = agreement + (capsules * votes).sum(2)
        return capsules


def _squashed(capsules: Tensor) -> Tensor:
    """Scale capsules (N, P, R) of length n to length n^2 / (1 + n^2)."""
    length = torch.linalg.vector_norm(capsules, dim=1, keepdim=True)  # its gradient is 0 at 0
    return capsules * (length / (1 + length.square()))
