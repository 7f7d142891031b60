"""Image Transformer, local attention in two dimensions: tokens form a grid, and its blocks see what is around them.

Paper: Parmar et al., "Image Transformer", ICML 2018, arXiv 1802.05751, section 3.2 (2D local attention).
Departures: the sequence of tokens is folded row by row. The paper generates pixels block by block, but tokens are
generated row by row: in the decoder role a block sees only those surroundings that come before the query in row order.
In the encoder role it also sees the rows below.
Cost: O(T (h + 2 f) (w + 2 g)) for blocks of h x w and a margin of f rows and g columns. A step costs O((h + f) (w + 2
g)), at any position, and keeps h + f rows of the grid.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.grid import Grid
from mtkit.attention.options import ListOf, Positive, Within, numbers
from mtkit.attention.slots import combining

ROWS_AND_COLUMNS = "rows and columns"


class Image2d(PatternAttention):
    """Scaled dot-product attention of a grid's blocks to themselves and to the tokens around them.

    image_width: tokens per row of the grid. image_query_shape: rows and columns of a query block, as [8, 16] or
    8x16. image_flange: number of rows seen above the block and, in the encoder role, below it, and of columns seen on
    either side.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Parmar et al. 2018, arXiv 1802.05751"
    complexity = "O(T (h + 2 f) (w + 2 g))"
    growth = 1
    longest_path = "O(T / (W (h + f))), decoder none"
    # other positions add to scores by distance, which lists of keys do not record
    slots = combining("projection", "merge", "regularizer", "nearby", positions={"rotary"})
    small: ClassVar[dict[str, Any]] = {"image_width": 4, "image_query_shape": [2, 2], "image_flange": [1, 1]}
    variants = ({"image_query_shape": [2, 3], "image_flange": [0, 2]}, {"image_width": 7, "image_flange": [2, 0]})

    def __init__(
        self,
        site: Site,
        *,
        image_width: Positive = 32,
        image_query_shape: Annotated[str | Sequence[int], ListOf(Within(1), ROWS_AND_COLUMNS, 2)] = (8, 16),
        image_flange: Annotated[str | Sequence[int], ListOf(Within(0), ROWS_AND_COLUMNS, 2)] = (8, 16),
    ) -> None:
        super().__init__(site)
        (rows, columns), (above, aside) = numbers(image_query_shape), numbers(image_flange)
        self.groups = by_head([Grid(image_width, (rows, columns), (above, aside))] * site.heads)
