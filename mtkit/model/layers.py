"""Encoder and decoder layers of sub-layers (`mtkit.model.sublayers`), and one pass through a stack of layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mtkit.attention import Attended, Attention, State
from mtkit.errors import MtkitError
from mtkit.model.sublayers import FeedForward, Residual, Stream, residual
from mtkit.recipe import ModelSettings

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
        marks: Tensor | None = None,
    ) -> None:
        """`weights` gathers the attention weights of its roles; `marks` (B, N) mark the tokens of a step."""
        self.self_carry: Any = None
        self.cross_carry: Any = None
        self.losses = losses
        self.log_prob = log_prob
        self.weights = weights
        self.marks = marks

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
        raise MtkitError(f"attend of {name} returns {type(attended).__name__}; it must return Attended(output)")
    if attended.output.shape != query.shape:
        raise MtkitError(
            f"attend of {name} makes an output {(*attended.output.shape,)} from a query "
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
        self, x: Stream, state: State, stack_pass: StackPass, *, need_weights: bool
    ) -> tuple[Stream, State, Tensor | None]:
        """x (B, N, D), the newest token of each hypothesis, to x and the state after it.

        Also returns the weights of the attention to the source.
        """
        x, self_state, _ = self.attend_step("decoder", x, state["self"], stack_pass)
        x, cross_state, weights = self.attend_step("cross", x, state["cross"], stack_pass, need_weights)
        x = self.feed_forward.around(x, self.feed_forward_residual)
        return x, {"self": self_state, "cross": cross_state}, weights

    def attend_step(
        self, role: str, x: Stream, state: State, stack_pass: StackPass, need_weights: bool = False
    ) -> tuple[Stream, State, Tensor | None]:
        """One attention sub-layer of `step`: x, the attention's state, and its weights if they are needed."""
        attention, around, kind = self.attention_parts(role)
        inputs = {"carry": getattr(stack_pass, kind), "query_marks": stack_pass.marks}
        attended, state = attention.step(around.before(x), state, need_weights=need_weights, **inputs)
        setattr(stack_pass, kind, attended.carry)
        return around.after(x, attended.output), state, attended.weights

    def attention_parts(self, role: str) -> tuple[Attention, Residual, str]:
        """The attention of a role, its residual, and the name of its carry in `StackPass`."""
        if role == "cross":
            return self.cross_attention, self.cross_residual, "cross_carry"
        return self.self_attention, self.self_residual, "self_carry"
