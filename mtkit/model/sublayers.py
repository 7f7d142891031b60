"""Parts of encoder and decoder layers: dropout, feed-forward network, layer norm and residuals.

A stream of tokens between sub-layers is a tensor (..., D), or a pair of them if layers are reversible.
"""

from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.device import autocast_disabled
from mtkit.model.gpu_layers import add_and_norm, feed_forward_and_norm, trains_fused
from mtkit.model.recomputed_norms import Recomputed
from mtkit.recipe import ModelSettings

POOL_ELEMENTS = 1 << 24
"""Bytes in a pool: a million possible starts of a mask."""

STRIDE = 16
"""Masks begin at multiples of this, so that they are aligned for vector loads."""


class Dropout(nn.Module):
    """Zeroes each number with probability `share` in training and scales the others up (Srivastava et al., 2014).

    On the CPU the mask is a stretch of a fixed pool of independent draws, and only its start is drawn, with torch's
    generator: drawing all numbers would take a tenth of the training time. If two stretches overlap (for two of a
    million numbers each, one time in eight), two masks share draws at different positions. Masks are a function of the
    generator's seed. Tensors larger than half a pool, and tensors on other devices, use PyTorch's dropout.
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
        mask = _pool(self.share)[begin : begin + x.numel()].view(x.shape)
        dropped: Tensor = _Masked.apply(x, mask, _factor(self.share, x.dtype))  # type: ignore[no-untyped-call]
        return dropped

    def extra_repr(self) -> str:
        """The share, for printing."""
        return str(self.share)


class _Masked(torch.autograd.Function):
    """x times a factor at mask bytes with all bits set, zero at the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.factor = factor
        kept, integer = torch.empty_like(x), INTEGERS[x.element_size()]
        torch.bitwise_and(x.view(integer), mask, out=kept.view(integer))  # other products with bytes are slow
        return kept.mul_(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Masked.apply(gradient, *ctx.saved_tensors, ctx.factor), None, None  # type: ignore[no-untyped-call]


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # the cached pool also serves training
def _pool(share: float) -> Tensor:
    """Bytes: zero with probability `share`, else all bits set; the same in every process."""
    generator = torch.Generator().manual_seed(20_141_958)
    return torch.empty(POOL_ELEMENTS, dtype=torch.int8).bernoulli_(1.0 - share, generator=generator).neg_()


@lru_cache(maxsize=8)
def _factor(share: float, dtype: torch.dtype) -> float:
    """1 / (1 - share), rounded to float32 and then to the type."""
    return torch.ones(()).div_(1.0 - share).to(dtype).item()


def forget_pools() -> None:
    """Free the pools of dropout masks; those in use are drawn again, the same."""
    _pool.cache_clear()


class FeedForward(nn.Module):
    """Two linear maps with an activation between, applied to each position.

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
            # in place: relu's backward pass needs only its result, and the linear map's not even that. On rows, because
            # autograd makes four copies for the gradient of a view that is written in place
            hidden = F.relu(hidden, inplace=True)
        else:
            hidden = F.gelu(hidden) if self.activation == "gelu" else F.silu(hidden)
        return self.outer(self.dropout(hidden)).unflatten(0, x.shape[:-1])

    def around(self, x: "Stream", residual: "Residual") -> "Stream":
        """The stream after the sub-layer of this layer and its residual."""
        inner, outer = self.inner, self.outer
        if isinstance(x, Tensor) and self.fuses and residual.fuses(x, inner.weight, outer.weight):
            return feed_forward_and_norm(x, inner, outer, residual.norm, residual.dropout.share)
        return residual.after(x, self(residual.before(x)))

    @property
    def fuses(self) -> bool:
        """Whether the layer has the form of `feed_forward_and_norm`."""
        has_plain_maps = type(self.inner) is type(self.outer) is nn.Linear  # adapters are not
        return has_plain_maps and self.activation == "relu" and not (self.training and self.dropout.share)


class LayerNorm(nn.LayerNorm):
    """Layer norm in the type of its input and weights; sums are in float32 (Ba et al., 2016, arXiv 1607.06450).

    CUDA's autocast would convert bfloat16 inputs and weights to float32 and return float32, so that the tokens' vectors
    would be converted back before every product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to the same."""
        low = x.dtype == self.weight.dtype != torch.float32
        with autocast_disabled(x.device) if low else nullcontext():
            output = super().forward(x)
        if output.requires_grad and x.device.type == "cpu":
            shape, weight, bias = self.normalized_shape, self.weight.detach(), self.bias.detach()
            compute = partial(F.layer_norm, x.detach(), shape, weight, bias, self.eps)
            output.recomputed = Recomputed(compute)  # type: ignore[attr-defined]
        return output


Stream = Tensor | tuple[Tensor | float, Tensor]


class Residual(nn.Module):
    """The sum of a sub-layer's input and output, with layer norm before the sub-layer or after the sum.

    post: x <- LN(x + f(x)) (Vaswani et al., 2017, section 3.1). pre: x <- x + f(LN(x)), with one more norm at the end
    of the stack (Xiong et al., 2020, arXiv 2002.04745).
    """

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        self.norm = LayerNorm(model.d_model)
        self.dropout = Dropout(model.dropout)
        self.pre = model.norm == "pre"

    def before(self, x: Stream) -> Tensor:
        """The sub-layer's input."""
        stream = cast(Tensor, x)
        normed: Tensor = self.norm(stream) if self.pre else stream
        return normed

    def after(self, x: Stream, output: Tensor) -> Stream:
        """The stream after the sub-layer."""
        stream = cast(Tensor, x)
        if self.fuses(stream, output):
            return add_and_norm(stream, output, self.norm, self.dropout.share)
        total: Tensor = stream + self.dropout(output)
        return total if self.pre else self.norm(total)

    def fuses(self, *tensors: Tensor) -> bool:
        """Whether a kernel computes `after` for such tensors."""
        return self.training and not self.pre and trains_fused(self.norm.weight, *tensors)


class ReversibleResidual(Residual):
    """(a, b) <- (b, a + f(LN(b))): f and the outputs determine the inputs, so that no activations need be kept.

    Two of them are the pair y1 = x1 + F(x2), y2 = x2 + G(y1) of Gomez et al. ("The Reversible Residual Network", 2017,
    arXiv 1707.04585) and Kitaev et al. ("Reformer", 2020, arXiv 2001.04451, section 3); a decoder layer is three.
    """

    def before(self, x: Stream) -> Tensor:
        """The sub-layer's input: the norm of the second stream."""
        normed: Tensor = self.norm(x[1])
        return normed

    def after(self, x: Stream, output: Tensor) -> Stream:
        """The second stream, and the first plus the output."""
        return x[1], x[0] + self.dropout(output)


def residual(model: ModelSettings) -> Residual:
    """A residual of the kind that `model.reversible` selects."""
    return ReversibleResidual(model) if model.reversible else Residual(model)


def to_stream(x: Tensor, model: ModelSettings) -> Stream:
    """The stream before the first sub-layer, from embeddings (..., D)."""
    if not model.reversible:
        return x
    x = upcast(x)  # outputs are added and later subtracted: bfloat16's rounding errors would accumulate
    return x, x


def from_stream(x: Stream) -> Tensor:
    """The output (..., D) of the last sub-layer: the stream, or the mean of the two."""
    return x if isinstance(x, Tensor) else (x[0] + x[1]) / 2
