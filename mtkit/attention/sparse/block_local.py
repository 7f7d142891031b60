"""Block-local attention: the sequence is cut into blocks, and every token sees its own block and neighbouring ones.

Paper: Liu et al., "Generating Wikipedia by Summarizing Long Sequences", ICLR 2018, arXiv 1801.10198, section 4.2.4
(local attention, within blocks of 256 tokens).
Departures: blocks before and after the query's own are options; the paper has none.
Cost: O(T b (1 + back + fwd)). A step costs O(b (1 + back)), at any position, and keeps as many tokens.
"""

from typing import Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Blocks
from mtkit.attention.options import Natural, Positive


class BlockLocal(PatternAttention):
    """Scaled dot-product attention within blocks of the sequence.

    block_size: tokens per block. block_back, block_fwd: number of blocks seen before and after the query's own. In the
    decoder role no later token is seen, whatever block_fwd is.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Liu et al. 2018, arXiv 1801.10198"
    complexity = "O(T b)"
    growth = 1
    longest_path = "none"
    small: ClassVar[dict[str, Any]] = {"block_size": 4}
    variants = ({"block_back": 1}, {"block_fwd": 2}, {"block_back": 1, "block_fwd": 1})

    def __init__(
        self, site: Site, *, block_size: Positive = 64, block_back: Natural = 0, block_fwd: Natural = 0
    ) -> None:
        super().__init__(site)
        self.groups = by_head([Blocks(block_size, block_back, block_fwd)] * site.heads)
