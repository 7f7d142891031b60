"""Encoder and decoder layers, and their parts: dropout, feed-forward, residuals.

A stream of tokens between sub-layers is a tensor (..., D), or a pair of them if layers are reversible.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import Attended, Attention, State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.device import autocast_disabled
from mtkit.errors import MtkitError
from mtkit.model.gpu_layers import add_and_norm, feed_forward_and_norm, trains_fused
from mtkit.recipe import ModelSettings

POOL_ELEMENTS = 1 << 24
"""Numbers in a pool, 64 MB: a million possible starts of a mask."""

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
        return x * _pool(self.share, x.dtype)[begin : begin + x.numel()].view(x.shape)

    def extra_repr(self) -> str:
        """The share, for printing."""
        return str(self.share)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # the cached pool also serves training
def _pool(share: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability `share`, else 1 / (1 - share); the same in every process."""
    generator = torch.Generator().manual_seed(20_141_958)
    pool = torch.empty(POOL_ELEMENTS).bernoulli_(1.0 - share, generator=generator)
    return pool.div_(1.0 - share).to(dtype)


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

    CUDA's autocast would convert a low input and low weights to float32 and hand on float32: the tokens' vectors would
    then be converted back in front of every product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to the same."""
        low = x.dtype == self.weight.dtype != torch.float32
        with autocast_disabled(x.device) if low else nullcontext():
            return super().forward(x)


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


Weights = dict[str, list[Tensor | None]]
"""Attention weights of each layer by role: "encoder" (B, H, S, S), "decoder" (B, H, T, T), "cross" (B, H, T, S); None
for a mechanism that has none. Row t belongs to the position that predicts target piece t."""


class StackPass:
    """One pass through a stack: each attention's carry, the sums of losses and log-probabilities, gathered weights.

    Layers write into it. It is no dataclass, because `fully_shard` passes copies of dataclasses to layers.
    """

    def __init__(
        self,
        *,
        losses: dict[str, Tensor] | None = None,
        log_prob: Tensor | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`weights` gathers the attention weights of the roles that it contains."""
        self.self_carry: Any = None
        self.cross_carry: Any = None
        self.losses = losses
        self.log_prob = log_prob
        self.weights = weights

    def attend(
        self, role: str, attention: Attention, around: Residual, x: Stream, memory: Tensor | None = None, **inputs: Any
    ) -> Stream:
        """One attention sub-layer: x (B, T, D) to the same shape; `inputs` are further arguments of the attention.

        Raises: MtkitError, naming the class, if the attention's result does not keep the contract.
        """
        kind = "cross_carry" if role == "cross" else "self_carry"
        wanted = self.weights is not None and role in self.weights
        query = around.before(x)
        attended = attention(query, memory, carry=getattr(self, kind), need_weights=wanted, **inputs)
        _check(attended, attention, query)
        setattr(self, kind, attended.carry)
        self.add(attended.losses, attended.log_prob)
        if self.weights is not None and wanted:
            self.weights[role].append(attended.weights)
        return around.after(x, attended.output)

    def add(self, losses: dict[str, Tensor], log_prob: Tensor | None) -> None:
        """Add losses by name, and the log-probability (B,) of sampled choices."""
        for name, loss in losses.items():
            self.losses = self.losses or {}
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss
        if log_prob is not None:
            self.log_prob = log_prob if self.log_prob is None else self.log_prob + log_prob


def _check(attended: object, attention: Attention, query: Tensor) -> None:
    """Raises: MtkitError, naming the class, if an attention's result does not keep the contract."""
    name = type(attention).__name__
    if not isinstance(attended, Attended):
        raise MtkitError(f"forward of {name} returns {type(attended).__name__}; it must return Attended(output)")
    if attended.output.shape != query.shape:
        raise MtkitError(
            f"forward of {name} makes an output {(*attended.output.shape,)} from a query "
            f"{(*query.shape,)}; it must have the query's shape"
        )


@dataclass(frozen=True)
class SubLayer:
    """One sub-layer: its function of stream, pass and encoded source, and its modules."""

    run: Callable[[Stream, StackPass, Tensor | None], Stream]
    modules: tuple[nn.Module, ...]


def feed_forward_sublayer(feed_forward: FeedForward, residual: Residual) -> SubLayer:
    """The feed-forward sub-layer."""

    def feed(x: Stream, stack_pass: StackPass, memory: Tensor | None) -> Stream:
        return feed_forward.around(x, residual)

    return SubLayer(feed, (feed_forward, residual))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, attention: Attention, model: ModelSettings) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = residual(model)
        self.feed_forward = FeedForward(model.d_model, model.feed_forward, model.activation, model.activation_dropout)
        self.feed_forward_residual = residual(model)

    def forward(
        self,
        x: Stream,
        stack_pass: StackPass,
        *,
        valid: Tensor | None,
        task: Tensor | None,
        marks: Tensor | None = None,
    ) -> Stream:
        """x (B, S, D), valid (B, S), task (B,), marks (B, S) to (B, S, D)."""
        for sublayer in self.sublayers(valid, task, marks):
            x = sublayer.run(x, stack_pass, None)
        return x

    def sublayers(self, valid: Tensor | None, task: Tensor | None, marks: Tensor | None = None) -> list[SubLayer]:
        """Both sub-layers."""

        def attend(x: Stream, stack_pass: StackPass, memory: Tensor | None) -> Stream:
            attention, around = self.attention, self.attention_residual
            return stack_pass.attend("encoder", attention, around, x, query_valid=valid, task=task, query_marks=marks)

        return [
            SubLayer(attend, (self.attention, self.attention_residual)),
            feed_forward_sublayer(self.feed_forward, self.feed_forward_residual),
        ]


@dataclass(frozen=True)
class Context:
    """A decoder layer's inputs in addition to its tokens."""

    memory: Tensor
    """(B, S, D), the encoded source."""
    memory_valid: Tensor | None
    """(B, S), True at real source tokens."""
    memory_carry: Any
    valid: Tensor | None
    """(B, T), True at real target tokens."""
    task: Tensor | None
    """(B,), the direction of each segment."""
    marks: Tensor | None = None
    """(B, T), the marks of the target; None if no attention reads them, here and below."""
    memory_marks: Tensor | None = None
    """(B, S), the marks of the source."""


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

    def forward(self, x: Stream, stack_pass: StackPass, context: Context) -> Stream:
        """x (B, T, D) to the same shape."""
        for sublayer in self.sublayers(context):
            x = sublayer.run(x, stack_pass, context.memory)
        return x

    def sublayers(self, context: Context) -> list[SubLayer]:
        """All three sub-layers."""
        inputs = {
            "query_valid": context.valid,
            "memory_carry": context.memory_carry,
            "task": context.task,
            "query_marks": context.marks,
        }

        def attend_target(x: Stream, stack_pass: StackPass, memory: Tensor | None) -> Stream:
            return stack_pass.attend("decoder", self.self_attention, self.self_residual, x, **inputs)

        def attend_source(x: Stream, stack_pass: StackPass, memory: Tensor | None) -> Stream:
            source = {"memory_valid": context.memory_valid, "memory_marks": context.memory_marks}
            return stack_pass.attend("cross", self.cross_attention, self.cross_residual, x, memory, **source, **inputs)

        return [
            SubLayer(attend_target, (self.self_attention, self.self_residual)),
            SubLayer(attend_source, (self.cross_attention, self.cross_residual)),
            feed_forward_sublayer(self.feed_forward, self.feed_forward_residual),
        ]

    def step(
        self, x: Stream, state: State, stack_pass: StackPass, *, need_weights: bool, marks: Tensor | None = None
    ) -> tuple[Stream, State, Tensor | None]:
        """x (B, N, D), the newest token of each hypothesis, and its marks (B, N), to x and the state after it.

        Also returns the weights of the attention to the source.
        """
        x, self_state, _ = self.attend_step("decoder", x, state["self"], stack_pass, marks)
        x, cross_state, weights = self.attend_step("cross", x, state["cross"], stack_pass, marks, need_weights)
        x = self.feed_forward.around(x, self.feed_forward_residual)
        return x, {"self": self_state, "cross": cross_state}, weights

    def attend_step(
        self,
        role: str,
        x: Stream,
        state: State,
        stack_pass: StackPass,
        marks: Tensor | None,
        need_weights: bool = False,
    ) -> tuple[Stream, State, Tensor | None]:
        """One attention sub-layer of `step`: x, the attention's state, and its weights if they are needed."""
        attention, around, kind = self.attention_parts(role)
        attended, state = attention.step(
            around.before(x), state, carry=getattr(stack_pass, kind), need_weights=need_weights, query_marks=marks
        )
        setattr(stack_pass, kind, attended.carry)
        return around.after(x, attended.output), state, attended.weights

    def attention_parts(self, role: str) -> tuple[Attention, Residual, str]:
        """The attention of a role, its residual, and the name of its carry in `StackPass`."""
        if role == "cross":
            return self.cross_attention, self.cross_residual, "cross_carry"
        return self.self_attention, self.self_residual, "self_carry"
