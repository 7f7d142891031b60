"""Multi-scale attention: each head has a window of its own width; lower layers have more narrow ones.

Paper: Guo, Qiu, Liu, Xue and Zhang, "Multi-Scale Self-Attention for Text Classification", AAAI 2020, arXiv 1912.00544.
Departures: scales are numbers of tokens, where the paper has some that are shares of the sentence's length, which
decoding does not know; the defaults are the paper's for 256 tokens. Numbers of heads are rounded by largest remainders,
of equal ones those of wider scales first. In the decoder role a window reaches back alone.
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
    narrow; 0 shares heads out equally in all layers. widths: the widths of the heads in place of scales, layer by layer
    from the first, for each head or for equal shares of the heads.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder", "decoder"})
    paper = "Guo et al. 2020, arXiv 1912.00544"
    complexity = "O(T w)"
    growth = 1
    small: ClassVar[Mapping[str, Any]] = {"scales": [1, 3, 5]}
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"scale_alpha": 3.0},
        {"scales": 4},
        {"widths": [0, 5, 2, 7]},
    )

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
    """The scales as a list. Raises: MtkitError where there is none, or one is no wider than that before it."""
    found = [scales] if isinstance(scales, int) else numbers(scales)
    if not found or any(wide <= narrow for narrow, wide in pairwise(found)):
        raise refused("scales", scales, "rise")
    return found


def _shared_out(scales: Sequence[int], alpha: float, site: Site) -> list[int]:
    """The width of each head, from narrow to wide: of scale k as many as H softmax(z) of k says.

    z of k is that of k + 1 and alpha / l in layer l, counted from 1, and 0 for the widest scale and in the last layer.
    """
    layer = site.layer + 1
    slope = 0.0 if layer == site.layers else alpha / layer
    z = [slope * (len(scales) - 1 - k) for k in range(len(scales))]
    shares = [math.exp(each - max(z)) for each in z]
    quotas = [site.heads * share / sum(shares) for share in shares]
    counts = [int(quota + 1e-9) for quota in quotas]
    by_remainder = sorted(range(len(scales)), key=lambda k: (round(quotas[k] - counts[k], 9), k), reverse=True)
    for k in by_remainder[: site.heads - sum(counts)]:
        counts[k] += 1
    return [scale for scale, count in zip(scales, counts, strict=True) for _ in range(count)]


def _of_layer(table: list[int], site: Site) -> list[int]:
    """The width of each head of this layer. Raises: MtkitError where the numbers are not those of equal shares."""
    if not table or len(table) % site.layers:
        raise refused("widths", table, f"have as many numbers for each of the {site.layers} layers")
    each = len(table) // site.layers
    return of_head("widths", table[site.layer * each : (site.layer + 1) * each], site)
