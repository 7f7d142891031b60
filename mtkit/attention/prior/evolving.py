"""Evolving attention: the map of the layer below is mixed into this layer's scores, and a convolution refines both.

Paper: Wang, Yang, Bai, Zhang, Bai, Yu, Zhang, Huang and Tong, "Evolving Attention with Residual Convolutions", ICML
2021, arXiv 2102.12895.
Departures: in the decoder and cross roles the convolution reads no later query's row and no hidden score (see
`_map_convolution`); symmetric padding, as in the authors' code, shows later tokens. The two weights are named as in
the paper; the authors' code swaps their names.
Cost: O(T S H kernel²) time; O(T S) memory with one more map per layer, and no fused kernel. A step costs O(t).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.options import OneOf, Positive, Share
from mtkit.attention.prior._map_convolution import ACTIVATIONS, Convolve, ConvolvedMaps


class Evolving(ConvolvedMaps):
    """Scaled dot-product attention whose map evolves from layer to layer through a residual convolution.

    alpha: weight of the lower layer's map; this layer's scores have weight 1 - alpha. beta: weight of the
    convolution; its input has weight 1 - beta. kernel: height and width of the convolution, odd. act: activation after
    the convolution, "relu", "leaky" or "none". share_conv: whether all layers share one convolution, which the second
    layer owns.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Wang et al. 2021, arXiv 2102.12895"
    small: ClassVar[Mapping[str, Any]] = {"alpha": 0.4, "beta": 0.5, "kernel": 3}
    variants = ({"kernel": 5}, {"act": "leaky"}, {"act": "none"})

    def __init__(
        self,
        site: Site,
        *,
        alpha: Share = 0.1,
        beta: Share = 0.1,
        kernel: Positive = 3,
        act: Annotated[str, OneOf(ACTIVATIONS)] = "relu",
        share_conv: bool = False,
    ) -> None:
        super().__init__(site, kernel=kernel, act=act, share_conv=share_conv)
        self.alpha = alpha
        self.beta = beta

    def combined(self, scores: Tensor, below: Tensor, convolve: Convolve) -> Tensor:
        """Return A = beta Conv(I) + (1 - beta) I, with I = alpha (A of the layer below) + (1 - alpha) S."""
        image = self.alpha * below + (1 - self.alpha) * scores
        return self.beta * convolve(image) + (1 - self.beta) * image
