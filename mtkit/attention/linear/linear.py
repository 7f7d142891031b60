"""Linear attention: a product of features replaces the exponential of a product, so that keys can be summed first.

Paper: Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", ICML 2020, arXiv 2006.16236, equations 4 to 12.
Departures: none. It does not approximate softmax attention; scores are not divided by the square root of K.
There are no weights, so attention dropout acts on the outputs of the heads.
Cost: O(T K V) time, O(T) memory. A step reads and writes K V numbers per head, at any position.
"""

from typing import Annotated, Any, ClassVar

from torch import Tensor

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import FEATURE_MAPS, Keys
from mtkit.attention.options import OneOf, Positive, Within


class LinearAttention(FeatureAttention):
    """Sums over keys of positive features, instead of the softmax.

    feature_map: "elu1" (the paper's elu(x) + 1) or "relu". eps: number added to the denominator. chunk: number of
    positions computed at once in the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Katharopoulos et al. 2020, arXiv 2006.16236"
    complexity = "O(T)"
    growth = 1
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants = ({"feature_map": "relu"},)

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf(FEATURE_MAPS)] = "elu1",
        eps: Annotated[float, Within(1e-12, 1.0)] = 1e-6,
        chunk: Positive = 64,
    ) -> None:
        super().__init__(site, eps=eps, chunk=chunk)
        self.feature_map = FEATURE_MAPS[feature_map]

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """Return phi(x), K features without a scale."""
        return Keys(self.feature_map(upcast(x)), None)

    @property
    def state_features(self) -> tuple[int, bool]:
        return self.projection.key_width, False
