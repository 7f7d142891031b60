"""Multi-scale attention: each head has its own window width; lower layers have more narrow windows.

Paper: Guo, Qiu, Liu, Xue and Zhang, "Multi-Scale Self-Attention for Text Classification", AAAI 2020, arXiv 1912.00544.
Departures: scales are numbers of tokens; some of the paper's are shares of the sentence's length, which is unknown in
decoding. The defaults are the paper's scales for 256 tokens. Numbers of heads are rounded by largest remainders; ties
prefer wider scales. In the decoder role a window only reaches back.
Cost: O(T w) for the mean width w. A step costs O(w), at any position, and each head keeps its own last w + 1 tokens.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import ListOf, Natural, Null, Within, numbers, of_head, refused

Widths = Annotated[str | Sequence[int], ListOf(Within(0), "tokens seen on each side, from narrow to wide")]
Table = Annotated[
    str | Sequence[int], ListOf(Within(0), "tokens seen on each side by the heads of one layer after another")
]


class MultiScale(PatternAttention):
    """Scaled dot-product attention within a sliding window whose width differs from head to head.

    scales: tokens seen on each side (in the decoder role, before the query's own), the widths that heads can have, as
    in 1,3,16; model.max_length or more is full attention. scale_alpha: how much more heads of the lower layers are
    narrow; 0 divides heads equally in all layers. widths: the widths of the heads, instead of scales, layer by layer
    from the first, for each head or for equal shares of the heads.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Guo et al. 2020, arXiv 1912.00544"
    complexity = "O(T w)"
    growth = 1
    longest_path = "O(T / w)"
    small: ClassVar[Mapping[str, Any]] = {"scales": [1, 3, 5]}
    variants = ({"scale_alpha": 3.0}, {"scales": 4}, {"widths": [0, 5, 2, 7]})

    def __init__(
        self,
        site: Site,
        *,
        scales: Natural | Widths = (1, 3, 16, 32, 64),
        scale_alpha: Annotated[float, Within(-100.0, 100.0)] = 0.5,
        widths: Annotated[Table | None, Null("by scales and scale_alpha")] = None,
    ) -> None:
        super().__init__(site)
        if widths is None:
            self.widths = _shared_out(_rising(scales), scale_alpha, site)
        else:
            self.widths = _of_layer(numbers(widths), site)
        self.groups = by_head([Band(width, width) for width in self.widths])


def _rising(scales: int | str | Sequence[int]) -> list[int]:
    """Return the scales as a list. Raises: MtkitError if it is empty or not strictly rising."""
    widths = [scales] if isinstance(scales, int) else numbers(scales)
    if not widths or any(wide <= narrow for narrow, wide in pairwise(widths)):
        raise refused("scales", scales, "rise")
    return widths


def _shared_out(scales: Sequence[int], alpha: float, site: Site) -> list[int]:
    """Return the width of each head, from narrow to wide: H softmax(z)_k heads have scale k.

    z_k is z_(k + 1) + alpha / l in layer l, counted from 1; it is 0 for the widest scale, and for all in the last
    layer.
    """
    layer = site.layer + 1
    slope = 0.0 if layer == site.layers else alpha / layer
    z = [slope * (len(scales) - 1 - k) for k in range(len(scales))]
    shares = [math.exp(logit - max(z)) for logit in z]
    quotas = [site.heads * share / sum(shares) for share in shares]
    counts = [int(quota + 1e-9) for quota in quotas]
    by_remainder = sorted(range(len(scales)), key=lambda k: (round(quotas[k] - counts[k], 9), k), reverse=True)
    for k in by_remainder[: site.heads - sum(counts)]:
        counts[k] += 1
    return [scale for scale, count in zip(scales, counts, strict=True) for _ in range(count)]


def _of_layer(table: list[int], site: Site) -> list[int]:
    """Return the width of each head in a layer. Raises: MtkitError if the table does not divide into equal shares."""
    if not table or len(table) % site.layers:
        raise refused("widths", table, f"have as many numbers for each of the {site.layers} layers")
    count = len(table) // site.layers
    return of_head("widths", table[site.layer * count : (site.layer + 1) * count], site)
