"""The base of the Sparse Transformer: a near and a far pattern, divided among heads or layers.

From any token, two hops through both patterns reach the whole sequence (in the decoder role, everything before it).
"""

import torch
from torch import Tensor

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

    def __init__(self, site: Site, near: Pattern, far: Pattern, sparse_heads: str) -> None:
        """Raises: MtkitError for sparse_heads=split with one head."""
        super().__init__(site)
        if sparse_heads == "split" and site.heads == 1:
            raise refused("sparse_heads", sparse_heads, "be merge or alternate with one head")
        half = -(-site.heads // 2)
        self.kinds = {
            "split": ["near"] * half + ["far"] * (site.heads - half),
            "merge": ["both"] * site.heads,
            "alternate": ["far" if site.layer % 2 else "near"] * site.heads,
        }[sparse_heads]
        patterns = {"near": near, "far": far, "both": near | far}
        self.groups = by_head([patterns[kind] for kind in self.kinds])

    def near_and_far(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """The paper's A1 and A2: whether the query at i sees the key at j in each pattern, ignoring causality."""
        raise NotImplementedError

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """A1, A2 or their union, according to each head; (H, ...)."""
        near, far = self.near_and_far(i, j)
        seen = {"near": near, "far": far, "both": near | far}
        return torch.stack([seen[kind].expand(torch.broadcast_shapes(i.shape, j.shape)) for kind in self.kinds])
