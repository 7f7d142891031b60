"""Disagreement: a training loss for heads that are alike in their values, their attended positions or their outputs.

Paper: Li, Tu, Yang, Lyu and Zhang, "Multi-Head Attention with Disagreement Regularization", EMNLP 2018,
arXiv 1810.10183, equations 5 to 7.
Departures: means per real token and over the layers of a role, not sums as in the paper: cosines lie in [-1, 1], the
overlap of positions in [0, 1], whatever the length. Pairs of a head with itself count, as in the paper's equations.
Cost: O(T D) on top of the attention, because the sum over all pairs is |sum of heads|^2; `position` needs the attention
weights, O(T S). Nothing at inference.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import LossWeight, SomeOf, parts
from mtkit.attention.slots import HeadResults, Regularizer

TYPES = ("subspace", "position", "output")


class Disagreement(Regularizer):
    """A loss that drives the heads apart: the mean agreement over all pairs of heads.

    types: what is compared, one or more of "subspace" (values), "position" (attention weights) and "output" (outputs of
    the heads), as in "output,position". weight: weight of the loss.
    """

    paper = "Li et al. 2018, arXiv 1810.10183"

    def __init__(
        self, site: Site, *, types: Annotated[str | Sequence[str], SomeOf(TYPES)] = "output", weight: LossWeight = 1.0
    ) -> None:
        super().__init__(site)
        self.types = tuple(parts(types))
        self.weight = weight
        self.needs_weights = "position" in self.types

    def forward(self, results: HeadResults) -> dict[str, Tensor]:
        """Return {"disagreement": weight * the sum over the types}, averaged over the layers of the run."""
        inputs, heads, values, weights, _ = results
        total = heads.new_zeros((), dtype=torch.float32)
        if "output" in self.types:
            total = total + _mean(_agreement(_directions(heads)), inputs.query_valid)
        if "subspace" in self.types:
            total = total + _mean(_agreement(_directions(values)), inputs.context_valid)
        if weights is not None and "position" in self.types:
            total = total + _mean(_agreement(weights), inputs.query_valid)
        return {"disagreement": self.weight / self.site.layers * total}


def _directions(heads: Tensor) -> Tensor:
    """Return each head's vector scaled to length 1, so that products are cosines, in at least float32."""
    return F.normalize(upcast(heads), dim=-1, eps=1e-6)


def _agreement(heads: Tensor) -> Tensor:
    """Return (B, T) from (B, H, T, X): the mean inner product over all pairs of heads, including each with itself."""
    return heads.mean(1).square().sum(-1)


def _mean(per_token: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean of (B, T) over real tokens."""
    if valid is None:
        return per_token.mean()
    return per_token.masked_fill(~valid, 0.0).sum() / valid.sum().clamp(min=1)
