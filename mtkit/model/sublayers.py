"""Dropout whose masks are cut from a pool on the CPU, where drawing them anew takes a tenth of training's time.

The position-wise feed-forward sub-layer.

Residuals around sub-layers: the ordinary sum with its norm, or two streams of which each can be had from the other.

A stream of tokens is a tensor (..., D) between ordinary sub-layers, and a pair of them between reversible ones.
"""

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.recipe import ModelSettings

POOL_ELEMENTS = 1 << 24
"""Numbers in a pool, 64 MB: a million places where a mask may begin."""

STRIDE = 16
"""Masks begin at multiples of this, so that they are aligned for vector loads."""


class Dropout(nn.Module):
    """Zeroes each number with probability `share` in training and scales the others up (Srivastava et al., 2014).

    On the CPU the mask is a stretch of a fixed pool of independent draws, from a place that is drawn each time with
    torch's generator: a multiplication instead of a draw for each number. Where two stretches overlap (for two of a
    million numbers each, one time in eight), two masks have draws in common, at other places. All of it is a function
    of the generator's seed. What is larger than half a pool, and all on other devices, is drawn in the ordinary way.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, to the same."""
        if not self.training or not self.share:
            return x
        if x.device.type != "cpu" or x.numel() > POOL_ELEMENTS // 2:
            return F.dropout(x, self.share)
        last = (POOL_ELEMENTS - x.numel()) // STRIDE
        begin = int(torch.randint(last + 1, ())) * STRIDE
        return x * _pool(self.share, x.dtype)[begin : begin + x.numel()].view(x.shape)

    def extra_repr(self) -> str:
        """The share, where the module is printed."""
        return str(self.share)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is kept here serves training too
def _pool(share: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability `share`, else 1 / (1 - share); the same in every process."""
    generator = torch.Generator().manual_seed(20_141_958)
    kept = torch.empty(POOL_ELEMENTS).bernoulli_(1.0 - share, generator=generator)
    return kept.div_(1.0 - share).to(dtype)


class FeedForward(nn.Module):
    """Two linear maps with an activation between, on each position alone.

    relu: Vaswani et al., 2017, equation 2. gelu, swish (x sigmoid(x), also named silu): the same with that activation.
    swiglu: silu(x W) * (x V), then the second map (Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202,
    equation 6), with a third matrix.
    """

    def __init__(self, d_model: int, inner: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(d_model, inner)
        self.gate = nn.Linear(d_model, inner) if activation == "swiglu" else None
        self.outer = nn.Linear(inner, d_model)
        self.dropout = Dropout(dropout)
        for linear in (self.inner, self.outer, self.gate):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        rows = x.flatten(0, -2)
        hidden = self.inner(rows)
        if self.gate is not None:
            hidden = F.silu(self.gate(rows)) * hidden
        elif self.activation == "relu":
            # in place: the backward pass of relu needs its result alone, that of the linear map not even that. On rows:
            # what is written in place must be no view, for whose gradients autograd makes four copies
            hidden = F.relu(hidden, inplace=True)
        else:
            hidden = F.gelu(hidden) if self.activation == "gelu" else F.silu(hidden)
        return self.outer(self.dropout(hidden)).unflatten(0, x.shape[:-1])


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
    x = upcast(x)  # what is added is taken away again; what bfloat16 rounds off in between would add up
    return x, x


def closed(x: Stream) -> Tensor:
    """What comes out of the last sub-layer as one stream (..., D): of two, their mean."""
    return x if isinstance(x, Tensor) else (x[0] + x[1]) / 2
