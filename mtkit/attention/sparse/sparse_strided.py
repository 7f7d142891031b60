"""Sparse Transformer, strided: every token sees a window of the latest tokens, and every l-th token before it.

Paper: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509,
sections 4.2 and 4.3.
Departures: an encoder form, which sees both sides.
Cost: O(T (l + T / l)), which is O(T sqrt T) for the default stride l, close to the square root of the longest length,
as in the paper. A step at position t costs O(l + t / l) and keeps all tokens; heads that see only the window keep l +
1.
"""

from typing import Annotated, Any, ClassVar

from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import NearRoot, OneOf, root_of_length
from mtkit.attention.sparse._factorized import SHARED, FactorizedAttention


class SparseStrided(FactorizedAttention):
    """Scaled dot-product attention over a window of l tokens and over every l-th token.

    stride: the distance l. sparse_heads: half of the heads see the window and half the stride ("split"), all heads see
    both ("merge"), or layers alternate ("alternate").
    """

    small: ClassVar[dict[str, Any]] = {"stride": 4}
    variants = ({"sparse_heads": "merge"}, {"sparse_heads": "alternate"})

    def __init__(
        self, site: Site, *, stride: NearRoot = None, sparse_heads: Annotated[str, OneOf(SHARED)] = "split"
    ) -> None:
        self.stride = root_of_length(stride, site)
        super().__init__(site, Band(self.stride, self.stride), Band(None, None, self.stride), sparse_heads)
