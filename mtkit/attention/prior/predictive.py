"""Predictive attention: a convolution over the map of the layer below predicts the map of this one.

Paper: Wang et al., "Predictive Attention Transformer: Improving Transformer with Attention Map Prediction", 2020,
OpenReview YQVjbJPnPc9.
Departures: in the decoder and cross roles the convolution reads no later query's row and no hidden score (see
`_map_convolution`); symmetric padding would show later tokens.
Cost: O(T S H kernel²) time; O(T S) memory with one more map per layer, and no fused kernel. A step costs O(t).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.options import OneOf, Positive, Share
from mtkit.attention.prior._map_convolution import ACTIVATIONS, Convolve, ConvolvedMaps


class Predictive(ConvolvedMaps):
    """Scaled dot-product attention whose scores are mixed with a convolution over the map of the layer below.

    alpha: weight of this layer's scores; the prediction has weight 1 - alpha. kernel: height and width of the
    convolution, odd. act: activation after the convolution, "relu", "leaky" or "none". share_conv: whether all layers
    share one convolution, which the second layer owns.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Wang et al. 2020, OpenReview YQVjbJPnPc9"
    small: ClassVar[Mapping[str, Any]] = {"alpha": 0.5, "kernel": 3}
    variants = ({"kernel": 5}, {"act": "leaky"}, {"act": "none"})

    def __init__(
        self,
        site: Site,
        *,
        alpha: Share = 0.9,
        kernel: Positive = 3,
        act: Annotated[str, OneOf(ACTIVATIONS)] = "relu",
        share_conv: bool = False,
    ) -> None:
        super().__init__(site, kernel=kernel, act=act, share_conv=share_conv)
        self.alpha = alpha

    def combined(self, scores: Tensor, below: Tensor, convolve: Convolve) -> Tensor:
        """Return A = alpha S + (1 - alpha) Conv(A of the layer below)."""
        return self.alpha * scores + (1 - self.alpha) * convolve(below)
