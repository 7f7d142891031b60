"""Sparse Transformer, fixed: every token sees its own block, and the last tokens of every block as its summary.

Paper: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509,
sections 4.2 and 4.3.
Departures: an encoder form, which sees both sides. All heads have the same summary cells; the paper also tries
different cells per head.
Cost: O(T (l + c T / l)), which is O(T sqrt T) for the default block length l, close to the square root of the longest
length, as in the paper. A step at position t costs O(l + c t / l) and keeps all tokens; heads that see only the block
keep l.
"""

from typing import Annotated, Any, ClassVar

from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Blocks, Comb
from mtkit.attention.options import NearRoot, OneOf, Positive, root_of_length
from mtkit.attention.sparse._factorized import SHARED, FactorizedAttention


class SparseFixed(FactorizedAttention):
    """Scaled dot-product attention within blocks of l tokens and over the last c tokens of every block.

    stride: the block length l. sparse_c: the number c of summary cells per block, at most all its tokens. sparse_heads:
    half of the heads see the block and half the summaries ("split"), all heads see both ("merge"), or layers alternate
    ("alternate").
    """

    small: ClassVar[dict[str, Any]] = {"stride": 5, "sparse_c": 2}
    variants = ({"sparse_heads": "split"}, {"sparse_heads": "alternate"})

    def __init__(
        self,
        site: Site,
        *,
        stride: NearRoot = None,
        sparse_c: Positive = 8,
        sparse_heads: Annotated[str, OneOf(SHARED)] = "merge",
    ) -> None:
        self.stride = root_of_length(stride, site)
        cells = min(sparse_c, self.stride)
        summaries = Comb(self.stride, first=self.stride - cells, count=cells)
        super().__init__(site, Blocks(self.stride), summaries, sparse_heads)
