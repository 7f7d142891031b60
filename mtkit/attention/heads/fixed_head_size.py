"""Heads of a fixed size: the width of a head is chosen independently of the model's width and the number of heads.

Paper: Bhojanapalli, Yun, Rawat, Reddi and Kumar, "Low-Rank Bottleneck in Multi-head Attention Models", ICML 2020,
arXiv 2002.07028, section 4: the scores of heads narrower than the sequence have a rank below its length, so that heads
that are a share of the model's width cannot represent all attention weights.
Departures: queries and keys start with the variance of their inputs, so that the variance of scores does not depend on
the size of the heads. The default is 128, not the model's width divided by the number of heads, which would be `full`.
Cost: O(T S H p) time for heads of size p, and O(H p) per token in a step's cache; in the projections H p replaces D.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Site
from mtkit.attention.options import Positive
from mtkit.attention.slots import Projection


class FixedHeadSize(Projection):
    """Queries, keys and values of heads whose size is an option.

    head_dim: size of each head; the number of heads need not divide the model's width. All attention weights can be
    represented if the size is at least the sequence's length.
    """

    paper = "Bhojanapalli et al. 2020, arXiv 2002.07028"
    small: ClassVar[dict[str, Any]] = {"head_dim": 4}
    variants = ({"head_dim": 5}, {"head_dim": 12})

    def __init__(self, site: Site, *, head_dim: Positive = 128) -> None:
        super().__init__(site, head_dim)

    def initialize(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        for linear in (q_proj, k_proj):
            nn.init.kaiming_uniform_(linear.weight, nonlinearity="linear")

    def adopted(self, full_state: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make narrower heads of `full` the first channels of these heads, with the same outputs.

        The other channels of keys, and the columns of `out_proj` for the other channels of values, become zero; queries
        and values keep theirs, so that gradients reach all.
        """
        adopted = dict(full_state)
        old = len(full_state["q_proj.bias"]) // self.heads if "q_proj.bias" in full_state else self.key_width
        if old >= self.key_width:
            return adopted
        for name in full_state.keys() & state.keys():
            linear, entry = name.partition(".")[0], full_state[name]
            if linear in ("q_proj", "k_proj", "v_proj") and entry.shape[1:] == state[name].shape[1:]:
                if linear == "q_proj":  # scores are divided by the root of the new width
                    entry = entry * (self.key_width / old) ** 0.5
                rows = state[name].unflatten(0, (self.heads, -1))[:, old:]
                rest = torch.zeros_like(rows) if linear == "k_proj" else rows
                adopted[name] = torch.cat([entry.unflatten(0, (self.heads, -1)), rest], 1).flatten(0, 1)
            elif name == "out_proj.weight" and len(entry) == len(state[name]):
                rest = state[name].unflatten(1, (self.heads, -1))[..., old:]
                columns = [entry.unflatten(1, (self.heads, -1)), torch.zeros_like(rest)]
                adopted[name] = torch.cat(columns, 2).flatten(1)
        return adopted
