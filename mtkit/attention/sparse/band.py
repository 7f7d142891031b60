"""Sliding-window attention: every token sees its neighbours up to a radius.

Paper: Beltagy, Peters and Cohan, "Longformer", 2020, arXiv 2004.05150, section 3.1 (sliding window); the local
attention of Parmar et al., 2018, arXiv 1802.05751, and others.
Departures: the option is the radius on each side; the paper's w counts both sides.
Cost: O(T r). A step costs O(r), at any position, and keeps the last r + 1 tokens.
"""

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import NaturalByLayer, of_layer


class BandAttention(PatternAttention):
    """Scaled dot-product attention within a sliding window.

    window_radius: number of tokens seen on each side of the query's own token (before it in the decoder role); one
    number, or one per layer.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Beltagy et al. 2020, arXiv 2004.05150"
    complexity = "O(T r)"
    growth = 1
    longest_path = "O(T / r)"

    def __init__(self, site: Site, *, window_radius: NaturalByLayer = 128) -> None:
        super().__init__(site)
        radius = of_layer("window_radius", window_radius, site)
        self.groups = by_head([Band(radius, radius)] * site.heads)
