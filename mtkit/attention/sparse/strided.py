"""Strided attention: every token sees the tokens a multiple of the stride away, over the whole sequence.

Paper: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509,
section 4.3 (the second head of strided attention); Lin et al., "A Survey of Transformers", 2021, arXiv 2106.04554.
Departures: an encoder form, which sees both sides.
Cost: O(T^2 / l) for a stride of l: O(T sqrt T) for the default, which is close to the square root of the longest
length, as in the paper. A step at position t costs O(t / l) and keeps all tokens.
"""

from typing import Any, ClassVar

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import NearRoot, root_of_length


class StridedAttention(PatternAttention):
    """Scaled dot-product attention to every l-th token, counted from the query's own.

    stride: the distance l.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    paper = "Child et al. 2019, arXiv 1904.10509"
    complexity = "O(T √T)"
    growth = 1.5
    longest_path = "none"
    small: ClassVar[dict[str, Any]] = {"stride": 4}

    def __init__(self, site: Site, *, stride: NearRoot = None) -> None:
        super().__init__(site)
        self.stride = root_of_length(stride, site)
        self.groups = by_head([Band(None, None, self.stride)] * site.heads)
