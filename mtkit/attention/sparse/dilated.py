"""Dilated sliding window: every token sees neighbours that are `dilation` positions apart, so that few reach far.

Paper: Beltagy, Peters and Cohan, "Longformer", 2020, arXiv 2004.05150, section 3.1 (dilated sliding window), with a
dilation for each head.
Departures: the option is the radius on each side; the paper's w counts both sides.
Cost: O(T r) for any dilation d, because positions with the same remainder mod d form a sequence with an undilated
window. A step costs O(r), at any position, and keeps the last r d + 1 tokens.
"""

from typing import Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import Natural, PositiveByHead, of_head


class DilatedAttention(PatternAttention):
    """Scaled dot-product attention within a sliding window with gaps.

    window_radius: number of steps seen on each side of the query's own token (before it in the decoder role). dilation:
    positions per step; one number, or a list such as 1,1,2,4 with one for each head or for equal shares of the heads. 1
    leaves no gaps.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Beltagy et al. 2020, arXiv 2004.05150"
    complexity = "O(T r)"
    growth = 1
    longest_path = "none"
    small: ClassVar[dict[str, Any]] = {"window_radius": 4, "dilation": 2}
    variants = ({"dilation": [1, 3]}, {"dilation": 1})

    def __init__(self, site: Site, *, window_radius: Natural = 128, dilation: PositiveByHead = 2) -> None:
        super().__init__(site)
        dilations = of_head("dilation", dilation, site)
        self.groups = by_head([Band(window_radius, window_radius, step) for step in dilations])
