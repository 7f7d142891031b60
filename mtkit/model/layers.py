"""Dropout whose masks are cut from a pool on the CPU, where drawing them anew takes a tenth of training's time.

The position-wise feed-forward sub-layer.

Residuals around sub-layers: the ordinary sum with its norm, or two streams of which each can be had from the other.

A stream of tokens is a tensor (..., D) between ordinary sub-layers, and a pair of them between reversible ones.

Encoder and decoder layers: attention and feed-forward, each with its residual and norm.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import Attended, Attention, State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.errors import MtkitError
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


Weights = dict[str, list[Tensor | None]]
"""Attention weights of each layer by role: "encoder" (B, H, S, S), "decoder" (B, H, T, T), "cross" (B, H, T, S); None
for a mechanism that has none. Row t is that of the position that predicts target piece t."""


class Passing:
    """What passes beside the tokens from layer to layer: each attention's carry, the losses, and what was sampled.

    Layers write into it. It is no dataclass, because `fully_shard` hands a layer a copy of those.
    """

    def __init__(
        self,
        *,
        losses: dict[str, Tensor] | None = None,
        log_prob: Tensor | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`weights` gathers the attention weights of the roles that are in it."""
        self.self_carry: Any = None
        self.cross_carry: Any = None
        self.losses = losses
        self.log_prob = log_prob
        self.weights = weights

    def wants(self, role: str) -> bool:
        """Whether the attention weights of a role are gathered."""
        return self.weights is not None and role in self.weights

    def add(self, attended: Attended, role: str) -> Tensor:
        """The attention's output, once its losses and log-probability are summed in and its weights are gathered."""
        self.sum_in(attended.losses, attended.log_prob)
        if self.weights is not None and role in self.weights:
            self.weights[role].append(attended.weights)
        return attended.output

    def sum_in(self, losses: dict[str, Tensor], log_prob: Tensor | None) -> None:
        """Add losses by name, and the log-probability (B,) of what was sampled."""
        for name, loss in losses.items():
            self.losses = self.losses or {}
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss
        if log_prob is not None:
            self.log_prob = log_prob if self.log_prob is None else self.log_prob + log_prob


def attended_by(attention: Attention, query: Tensor, *memory: Tensor, **given: Any) -> Attended:
    """What a pass of the attention over whole sequences gives.

    Raises: MtkitError, naming the class, where that is not what the contract asks for.
    """
    attended = attention(query, *memory, **given)
    if not isinstance(attended, Attended):
        raise MtkitError(
            f"forward of {type(attention).__name__} returns {type(attended).__name__}; it must return Attended(output)"
        )
    if attended.output.shape != query.shape:
        raise MtkitError(
            f"forward of {type(attention).__name__} makes an output {(*attended.output.shape,)} from a query "
            f"{(*query.shape,)}; it must have the query's shape"
        )
    return attended


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, attention: Attention, model: ModelSettings) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = residual(model)
        self.feed_forward = FeedForward(model.d_model, model.feed_forward, model.activation, model.activation_dropout)
        self.feed_forward_residual = residual(model)

    def forward(self, x: Stream, passing: Passing, *, valid: Tensor | None, task: Tensor | None) -> Stream:
        """x (B, S, D), valid (B, S), task (B,) to (B, S, D)."""
        return self.feed(self.attend(x, passing, valid=valid, task=task))

    def attend(self, x: Stream, passing: Passing, *, valid: Tensor | None, task: Tensor | None) -> Stream:
        """The self-attention sub-layer: x (B, S, D) to the same shape."""
        here = self.attention_residual
        attended = attended_by(
            self.attention,
            here.before(x),
            query_valid=valid,
            carry=passing.self_carry,
            task=task,
            need_weights=passing.wants("encoder"),
        )
        passing.self_carry = attended.carry
        return here.after(x, passing.add(attended, "encoder"))

    def feed(self, x: Stream) -> Stream:
        """The feed-forward sub-layer: (B, S, D) to the same shape."""
        here = self.feed_forward_residual
        return here.after(x, self.feed_forward(here.before(x)))


@dataclass(frozen=True)
class Context:
    """What a decoder layer reads besides its own tokens."""

    memory: Tensor
    """(B, S, D), the encoded source."""
    memory_valid: Tensor | None
    """(B, S), True at real source tokens."""
    memory_carry: Any
    valid: Tensor | None
    """(B, T), True at real target tokens."""
    task: Tensor | None
    """(B,), the direction of each segment."""


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded source, and feed-forward."""

    def __init__(self, self_attention: Attention, cross_attention: Attention, model: ModelSettings) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = residual(model)
        self.cross_attention = cross_attention
        self.cross_residual = residual(model)
        self.feed_forward = FeedForward(model.d_model, model.feed_forward, model.activation, model.activation_dropout)
        self.feed_forward_residual = residual(model)

    def forward(self, x: Stream, passing: Passing, context: Context) -> Stream:
        """x (B, T, D) to the same shape."""
        return self.feed(self.attend_source(self.attend_target(x, passing, context), passing, context))

    def attend_target(self, x: Stream, passing: Passing, context: Context) -> Stream:
        """The causal self-attention sub-layer: x (B, T, D) to the same shape."""
        here = self.self_residual
        attended = attended_by(
            self.self_attention,
            here.before(x),
            query_valid=context.valid,
            carry=passing.self_carry,
            memory_carry=context.memory_carry,
            task=context.task,
            need_weights=passing.wants("decoder"),
        )
        passing.self_carry = attended.carry
        return here.after(x, passing.add(attended, "decoder"))

    def attend_source(self, x: Stream, passing: Passing, context: Context) -> Stream:
        """The sub-layer of attention to the source: x (B, T, D) to the same shape."""
        here = self.cross_residual
        attended = attended_by(
            self.cross_attention,
            here.before(x),
            context.memory,
            query_valid=context.valid,
            memory_valid=context.memory_valid,
            carry=passing.cross_carry,
            memory_carry=context.memory_carry,
            task=context.task,
            need_weights=passing.wants("cross"),
        )
        passing.cross_carry = attended.carry
        return here.after(x, passing.add(attended, "cross"))

    def feed(self, x: Stream) -> Stream:
        """The feed-forward sub-layer: (..., D) to the same shape."""
        here = self.feed_forward_residual
        return here.after(x, self.feed_forward(here.before(x)))

    def step(
        self, x: Stream, state: State, passing: Passing, *, need_weights: bool
    ) -> tuple[Stream, State, Tensor | None]:
        """x (B, N, D), the newest token of each hypothesis; weights are those of the attention to the source."""
        here = self.self_residual
        attended, self_state = self.self_attention.step(here.before(x), state["self"], carry=passing.self_carry)
        passing.self_carry = attended.carry
        x = here.after(x, attended.output)
        here = self.cross_residual
        attended, cross_state = self.cross_attention.step(
            here.before(x), state["cross"], carry=passing.cross_carry, need_weights=need_weights
        )
        passing.cross_carry = attended.carry
        x = self.feed(here.after(x, attended.output))
        return x, {"self": self_state, "cross": cross_state}, attended.weights
