"""Talking heads: scores are mixed across the heads before the softmax, and weights after it.

Paper: Shazeer, Lan, Cheng, Ding and Hou, "Talking-Heads Attention", 2020, arXiv 2003.02436.
Departures: a square mix starts at the identity, so that the model starts as full attention; a mix between different
numbers of heads starts at random, as in the authors' code, since equal heads would stay equal. The bias of relative
positions is added after the first mix, one for each head of the softmax; so is the mask, which must not be mixed into
other heads. `Attended.weights` are the softmax's; the second mix may make them negative.
Cost: O(T S) time and memory, with O(T S H) multiplications for the mixes of each head; no fused kernel supports them. A
step costs O(t).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Inputs, Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Null, Positive, refused
from mtkit.attention.slots import SLOTS, Projection
from mtkit.errors import MtkitError

HeadCount = Annotated[Positive | None, Null("the number of heads")]


class TalkingHeads(ScoreAttention):
    """Scaled dot-product attention whose heads exchange scores and weights through two learned matrices.

    key_heads: number of heads that make scores, which divide the model's width equally. softmax_heads: number of maps
    that have a softmax. value_heads: number of heads that sum values, which divide the model's width equally.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Shazeer et al. 2020, arXiv 2003.02436"
    small: ClassVar[Mapping[str, Any]] = {}
    variants = (
        {"softmax_heads": 6},
        {"key_heads": 8},
        {"value_heads": 2},
        {"key_heads": 2, "softmax_heads": 3, "value_heads": 1},
    )

    def __init__(
        self, site: Site, *, key_heads: HeadCount = None, softmax_heads: HeadCount = None, value_heads: HeadCount = None
    ) -> None:
        keys, self.softmax_heads, values = (count or site.heads for count in (key_heads, softmax_heads, value_heads))
        projection = _HeadNumbers(site, keys, values) if {keys, values} != {site.heads} else None
        super().__init__(site, projection)
        if {keys, self.softmax_heads, values} != {site.heads}:
            self._refuse_slots_per_head()
        self.scores_mix = nn.Parameter(_mix(keys, self.softmax_heads))
        self.weights_mix = nn.Parameter(_mix(self.softmax_heads, values))

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        return _mixed(self.scores(pairs), self.scores_mix), None

    def mixed(self, weights: Tensor) -> Tensor:
        """Return the weights mixed over the heads (`weights_mix`); hidden keys still have zero."""
        return _mixed(weights, self.weights_mix)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add what each softmax takes from the heads' scores, and what it gives to the heads' values."""
        mixing = {"score mixing": self.scores_mix.T.clone(), "weight mixing": self.weights_mix.clone()}
        return super().learned_numbers(inputs) | mixing

    def _refuse_slots_per_head(self) -> None:
        """Raises: MtkitError for filled slots that need one entry per head of `site.heads`, if the numbers of heads
        differ.
        """
        positions = self.positions
        rotations_only = positions is not None and not (positions.on_scores or positions.on_values)
        for slot in SLOTS[1:] if rotations_only else SLOTS:
            if (value := getattr(self.site, slot)) is not None:
                raise MtkitError(
                    f"key_heads, softmax_heads and value_heads must be the {self.site.heads} heads with {slot}={value}"
                )


def _mix(heads: int, others: int) -> Tensor:
    """Return an initial matrix (heads, others)."""
    return torch.eye(heads) if heads == others else nn.init.xavier_uniform_(torch.empty(heads, others))


def _mixed(x: Tensor, mix: Tensor) -> Tensor:
    """Mix (B, H, T, S) to (B, H', T, S) by mix (H, H'), in at least float32."""
    with torch.autocast(x.device.type, enabled=False):
        x, mix = upcast(x), upcast(mix)
        return torch.bmm(mix.T.expand(len(x), -1, -1), x.flatten(2)).unflatten(2, x.shape[2:])


class _HeadNumbers(Projection):
    """A projection with its own numbers of key and value heads, each dividing the width of all heads equally."""

    def __init__(self, site: Site, key_heads: int, value_heads: int) -> None:
        """Raises: MtkitError if they do not divide the width."""
        super().__init__(site)
        for option, heads in (("key_heads", key_heads), ("value_heads", value_heads)):
            if site.heads_width % heads:
                raise refused(option, heads, f"divide the width of all heads, {site.heads_width}")
        self.heads = self.key_heads = key_heads
        self.value_heads = value_heads
        self.key_width = site.heads_width // key_heads
        self.value_width = site.heads_width // value_heads

    @property
    def joined_width(self) -> int:
        return self.value_heads * self.value_width
