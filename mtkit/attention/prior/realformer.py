"""RealFormer: the scores of each layer are added to the scores of the layers below, and the softmax is over the sum.

Paper: He, Ravula, Kanagal and Ainslie, "RealFormer: Transformer Likes Residual Attention", Findings of ACL 2021,
arXiv 2012.11747, section 3.
Departures: none. Only scores are carried: no mask, position bias or dropout, which would add up.
Cost: O(T S) time and memory: the carried scores rule out the fused kernel. A step costs O(t).
"""

from torch import Tensor

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast


class RealFormer(ScoreAttention):
    """Scaled dot-product attention with a residual: scores add up from layer to layer.

    running_mean: whether the softmax is over the mean of the layers' scores instead of their sum, for deep stacks.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "He et al. 2021, arXiv 2012.11747"

    def __init__(self, site: Site, *, running_mean: bool = False) -> None:
        super().__init__(site)
        self.running_mean = running_mean

    def logits(self, pairs: Pairs, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return R = Q K^T / sqrt(K) + the R (B, H, T, S) of the layer below, in at least float32; carries R."""
        scores = upcast(self.scores(pairs))
        residual = scores if carry is None else scores + carry
        return residual / (self.site.layer + 1) if self.running_mean else residual, residual
