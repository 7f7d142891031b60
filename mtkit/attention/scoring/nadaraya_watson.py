"""Nadaraya-Watson attention: a Gaussian kernel of the distance between query and key weighs the values.

Paper: Nadaraya, "On Estimating Regression", 1964; Watson, "Smooth Regression Analysis", 1964; with a learned width,
Zhang, Lipton, Li and Smola, "Dive into Deep Learning", 2021, arXiv 2106.11342, chapter on attention pooling.
Departures: queries, keys and values are projected, in several heads. Scores leave out the square of the query, which is
the same for all keys: they are products minus a norm, and no differences of pairs are stored. The width starts so that
the products have the scale of full attention.
Cost: O(T S) time and memory. A step costs O(t).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import expand_heads, scores_of, upcast
from mtkit.attention.options import OneOf, refused
from mtkit.attention.positions import Rotary
from mtkit.attention.slots import OWN_VECTORS
from mtkit.errors import MtkitError

WIDTHS = ("scalar", "per-head", "per-dim")


class NadarayaWatson(ScoreAttention):
    """Attention whose scores are -|w (q - k)|² / 2, with a learned w.

    width: how many numbers w has: one ("scalar"), one per head ("per-head") or one per dimension of each head
    ("per-dim"). exclude_self: whether a token does not see itself, so that it is estimated from the others.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Nadaraya 1964; Watson 1964; Zhang et al. 2021, arXiv 2106.11342"
    complexity = "O(T²)"
    growth = 2
    weights = True
    undecayed = ("width",)
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {**ScoreAttention.slots, "projection": OWN_VECTORS}
    variants = ({"width": "scalar"}, {"width": "per-dim"})

    def __init__(
        self, site: Site, *, width: Annotated[str, OneOf(WIDTHS)] = "per-head", exclude_self: bool = False
    ) -> None:
        super().__init__(site)
        if exclude_self and site.role == "cross":
            raise MtkitError("exclude_self means nothing in the cross role: no key is the query's own token")
        if width == "per-dim" and isinstance(self.positions, Rotary):
            raise refused("width", width, "be another with rotary positions: they mix the dimensions of a head")
        self.exclude_self = exclude_self
        shape = {"scalar": (1, 1), "per-head": (site.heads, 1), "per-dim": (site.heads, self.projection.key_width)}
        self.width = nn.Parameter(torch.full(shape[width], self.scale**0.5))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add |w|: the inverse width of the kernel, by dimension if it has several."""
        w = self.width.abs()
        return super().learned_numbers(inputs) | {"w": w.squeeze(1) if w.shape[1] == 1 else w}

    @property
    def precision(self) -> Tensor:
        """w² of each head and dimension, (H, K)."""
        return upcast(self.width).square().expand(self.site.heads, self.projection.key_width)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys, values, and the norms |w k|² / 2 of each key (B, G, S, H/G) in the heads that share it."""
        columns = super().columns(memory, position)
        keys = upcast(columns["keys"])
        shared = self.precision.unflatten(0, (keys.shape[1], -1)).transpose(1, 2)  # (G, K, H/G)
        with torch.autocast(keys.device.type, enabled=False):
            return {**columns, "norms": keys.square() @ shared / 2}

    def scores(self, pairs: Pairs) -> Tensor:
        """w² q k - |w k|² / 2, in float32 or wider."""
        q = (upcast(pairs.q) * self.precision.unsqueeze(1)).type_as(pairs.q)
        norms = pairs.columns["norms"].transpose(2, 3).flatten(1, 2).unsqueeze(2)  # (B, H, 1, S)
        return upcast(scores_of(q, pairs.keys, 1.0)) - norms

    def shown(self, pairs: Pairs) -> Tensor | None:
        """All tokens except the query's own if exclude_self is set."""
        return pairs.query_position.unsqueeze(-1) != pairs.key_position if self.exclude_self else None

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same from the differences of all pairs."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        k = expand_heads(pairs.keys, self.site.heads)
        differences = pairs.q.unsqueeze(3) - k.unsqueeze(2)  # (B, H, T, S, K)
        scores = -(self.width[:, None, None] * differences).square().sum(-1) / 2
        weights = self.softmax(scores, pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs), inputs.query), weights=weights)
