"""Dilated sliding window: every token sees neighbours that are `dilation` positions apart, so that few reach far.

Paper: Beltagy, Peters and Cohan, "Longformer", 2020, arXiv 2004.05150, section 3.1 (dilated sliding window), with a
dilation for each head.
Departures: the width is given as a radius on each side, where the paper's w counts both.
Cost: O(T r) for any dilation d: positions of one remainder mod d form a sequence with a plain window. A step costs
O(r), at any position, and keeps the last r d + 1 tokens.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import Natural, PositiveByHead, of_head


class DilatedAttention(PatternAttention):
    """Scaled dot-product attention within a sliding window with gaps.

    window_radius: steps seen on each side besides the query's own token (in the decoder role, before it). dilation:
    positions per step, one number, or a list, as 1,1,2,4, with one for each head or for equal shares of the heads; 1
    leaves no gaps.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder", "decoder"})
    paper = "Beltagy et al. 2020, arXiv 2004.05150"
    complexity = "O(T r)"
    growth = 1
    small: ClassVar[dict[str, Any]] = {"window_radius": 4, "dilation": 2}
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"dilation": [1, 3]}, {"dilation": 1})

    def __init__(self, site: Site, *, window_radius: Natural = 128, dilation: PositiveByHead = 2) -> None:
        super().__init__(site)
        self.radius, self.dilations = window_radius, of_head("dilation", dilation, site)
        self.groups = by_head([Band(window_radius, window_radius, each) for each in self.dilations])

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """j = i + t d for a whole t from -r to r, with the dilation d of each head; (H, ...)."""
        away = (i - j).abs()
        return torch.stack([(away % d == 0) & (away <= self.radius * d) for d in self.dilations])
