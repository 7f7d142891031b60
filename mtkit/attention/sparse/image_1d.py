"""Image Transformer, local attention in one dimension: blocks of queries see themselves and a memory around them.

Paper: Parmar et al., "Image Transformer", ICML 2018, arXiv 1802.05751, section 3.2 (1D local attention).
Departures: the sequence of tokens replaces the pixels in raster order. In the encoder role the memory is on both sides
of the block.
Cost: O(T (b + m)) for blocks of b and a memory of m. A step costs O(b + m), at any position, and keeps b + m tokens.
"""

from typing import Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Flanked
from mtkit.attention.options import Natural, Positive


class Image1d(PatternAttention):
    """Scaled dot-product attention of token blocks to themselves and to the tokens around them.

    image_block: tokens per block of queries. image_memory: number of tokens seen before the block and, in the encoder
    role, after it.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Parmar et al. 2018, arXiv 1802.05751"
    complexity = "O(T (b + m))"
    growth = 1
    longest_path = "O(T / (b + m))"
    small: ClassVar[dict[str, Any]] = {"image_block": 4, "image_memory": 3}
    variants = ({"image_memory": 0}, {"image_memory": 9})

    def __init__(self, site: Site, *, image_block: Positive = 128, image_memory: Natural = 128) -> None:
        super().__init__(site)
        self.groups = by_head([Flanked(image_block, image_memory, image_memory)] * site.heads)
