"""Residuals around sub-layers: the ordinary sum with its norm, or two streams of which each can be had from the other.

A stream of tokens is a tensor (..., D) between ordinary sub-layers, and a pair of them between reversible ones.
"""

from typing import cast

from torch import Tensor, nn

from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.model.dropout import Dropout
from mtkit.recipe import ModelSettings

Stream = Tensor | tuple[Tensor | float, Tensor]


class Residual(nn.Module):
    """The sum of a sub-layer's input and output, with layer norm before the sub-layer or after the sum.

    post: x <- LN(x + f(x)) (Vaswani et al., 2017, section 3.1). pre: x <- x + f(LN(x)), with one more norm at the end
    of the stack (Xiong et al., 2020, arXiv 2002.04745).
    """

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.d_model)
        self.dropout = Dropout(model.dropout)
        self.pre = model.norm == "pre"

    def before(self, x: Stream) -> Tensor:
        """What the sub-layer reads."""
        stream = cast(Tensor, x)
        normed: Tensor = self.norm(stream) if self.pre else stream
        return normed

    def after(self, x: Stream, output: Tensor) -> Stream:
        """What the next sub-layer gets."""
        total: Tensor = cast(Tensor, x) + self.dropout(output)
        return total if self.pre else self.norm(total)


class ReversibleResidual(Residual):
    """(a, b) <- (b, a + f(LN(b))): from what comes out and f, what went in follows, so that nothing need be kept.

    Two of them are the pair y1 = x1 + F(x2), y2 = x2 + G(y1) of Gomez et al. ("The Reversible Residual Network", 2017,
    arXiv 1707.04585) and Kitaev et al. ("Reformer", 2020, arXiv 2001.04451, section 3); a decoder layer is three.
    """

    def before(self, x: Stream) -> Tensor:
        """What the sub-layer reads: the norm of the second stream."""
        normed: Tensor = self.norm(x[1])
        return normed

    def after(self, x: Stream, output: Tensor) -> Stream:
        """The second stream, and the first with the output added."""
        return x[1], x[0] + self.dropout(output)


def residual(model: ModelSettings) -> Residual:
    """A residual of the kind that `model.reversible` selects."""
    return ReversibleResidual(model) if model.reversible else Residual(model)


def opened(x: Tensor, model: ModelSettings) -> Stream:
    """Embeddings (..., D) as what the first sub-layer gets."""
    if not model.reversible:
        return x
    x = widened(x)  # what is added is taken away again; what bfloat16 rounds off in between would add up
    return x, x


def closed(x: Stream) -> Tensor:
    """What comes out of the last sub-layer as one stream (..., D): of two, their mean."""
    return x if isinstance(x, Tensor) else (x[0] + x[1]) / 2
