"""LazyFormer: the first layer of a block computes attention weights, and the layers above it apply them again.

Paper: Ying, Ke, He and Liu, "LazyFormer: Self Attention with Lazy Update", 2021, arXiv 2102.12702.
Departures: dropout is the model's (the paper has none on shared weights); weights are carried before dropout, and each
layer draws its own. The layers are not widened to make up for the parameters saved.
Cost: scores and softmax, O(T S) time and memory, in one layer of each block; the products with the values, O(T S), in
all. A block keeps one map of weights, which rules out the fused kernel. A step costs O(t), and only the first layer of
a block keeps keys.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Site
from mtkit.attention.options import Positive
from mtkit.attention.slots import combining
from mtkit.errors import MtkitError


class Lazy(ScoreAttention):
    """Scaled dot-product attention that is computed once for several layers, each with its own values.

    lazy_block: layers that share one map of weights; 1 is full attention. The last block may have fewer.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Ying et al. 2021, arXiv 2102.12702"
    # not those with parameters that only a layer with scores would use
    slots = combining(
        "merge",
        "regularizer",
        "nearby",
        positions={"rotary", "alibi"},
        projection={"multi-query", "grouped-query", "fixed-head-size"},
    )
    small: ClassVar[Mapping[str, Any]] = {"lazy_block": 2}
    variants = ({"lazy_block": 1}, {"lazy_block": 3})

    def __init__(self, site: Site, *, lazy_block: Positive = 2) -> None:
        super().__init__(site)
        self.leads = site.layer % lazy_block == 0
        self.lends = (site.layer + 1) % lazy_block != 0 and site.layer + 1 < site.layers
        if not self.leads:
            del self.q_proj, self.k_proj
            self.positions = None  # they are part of the weights below

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Return (B, H, T, K); or the tokens (B, 1, T, D) if this layer has no scores."""
        return super().queries(query, position) if self.leads else query.unsqueeze(1)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys and values; only values if this layer has no scores."""
        if self.leads:
            return super().columns(memory, position)
        (v,) = self.projected(memory, self.v_proj)
        return {"values": self.projection.values(v)}

    def weighed(self, pairs: Pairs, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the softmax of the scores, or the weights (B, H, T, S) of the layer below; carries them within the
        block.

        Raises: MtkitError if a carry from the layer below is missing.
        """
        if self.leads:
            weights, _ = super().weighed(pairs, None)
        elif carry is None:
            raise MtkitError(f"layer {self.site.layer} of lazy attention needs what the layer below carries")
        else:
            weights = carry
        return weights, weights if self.lends else None
