"""The base of the Sparse Transformer: a near and a far pattern, divided among heads or layers.

From any token, two hops through both patterns reach the whole sequence (in the decoder role, everything before it).
"""

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Pattern
from mtkit.attention.options import refused

SHARED = ("split", "merge", "alternate")


class FactorizedAttention(PatternAttention):
    """Softmax attention over a near and a far pattern, which `sparse_heads` divides.

    "split": the first half of the heads sees the near keys, the second half the far keys. "merge": every head sees
    both, each key once. "alternate": even layers see the near keys, odd layers the far keys.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    paper = "Child et al. 2019, arXiv 1904.10509"
    complexity = "O(T √T)"
    growth = 1.5
    longest_path = "O(1)"

    def __init__(self, site: Site, near: Pattern, far: Pattern, sparse_heads: str) -> None:
        """Raises: MtkitError for sparse_heads=split with one head."""
        super().__init__(site)
        if sparse_heads == "split" and site.heads == 1:
            raise refused("sparse_heads", sparse_heads, "be merge or alternate with one head")
        half = -(-site.heads // 2)
        self.groups = by_head(
            {
                "split": [near] * half + [far] * (site.heads - half),
                "merge": [near | far] * site.heads,
                "alternate": [far if site.layer % 2 else near] * site.heads,
            }[sparse_heads]
        )
