"""Encoder and decoder layers: attention and feed-forward, each with its residual and norm."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mtkit.attention import Attended, Attention, State
from mtkit.errors import MtkitError
from mtkit.model.network import Weights
from mtkit.model.sublayers import FeedForward, Stream, residual
from mtkit.recipe import ModelSettings


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
