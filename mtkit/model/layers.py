"""Encoder and decoder layers: attention and feed-forward, each with its residual and norm."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mtkit.attention import Attended, Attention, State
from mtkit.model.feedforward import FeedForward
from mtkit.recipe import ModelSettings


class Residual(nn.Module):
    """The sum of a sub-layer's input and output, with layer norm before the sub-layer or after the sum.

    post: x <- LN(x + f(x)) (Vaswani et al., 2017, section 3.1). pre: x <- x + f(LN(x)), with one more norm at the end
    of the stack (Xiong et al., 2020, arXiv 2002.04745).
    """

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.d_model)
        self.dropout = nn.Dropout(model.dropout)
        self.pre = model.norm == "pre"

    def before(self, x: Tensor) -> Tensor:
        """What the sub-layer reads."""
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, output: Tensor) -> Tensor:
        """What the next sub-layer gets."""
        total = x + self.dropout(output)
        return total if self.pre else self.norm(total)


@dataclass
class Side:
    """What passes beside the tokens from layer to layer: each attention's carry, the losses, and what was sampled."""

    self_carry: Any = None
    cross_carry: Any = None
    losses: dict[str, Tensor] | None = None
    log_prob: Tensor | None = None

    def add(self, attended: Attended) -> Tensor:
        """The attention's output, once its losses and log-probability are summed in."""
        for name, loss in attended.losses.items():
            self.losses = self.losses or {}
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss
        if attended.log_prob is not None:
            self.log_prob = attended.log_prob if self.log_prob is None else self.log_prob + attended.log_prob
        return attended.output


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, attention: Attention, model: ModelSettings) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = Residual(model)
        self.feed_forward = FeedForward(model.d_model, model.feed_forward, model.activation, model.activation_dropout)
        self.feed_forward_residual = Residual(model)

    def forward(self, x: Tensor, valid: Tensor | None, side: Side, task: Tensor | None) -> Tensor:
        """x (B, S, D), valid (B, S)."""
        residual = self.attention_residual
        attended = self.attention(residual.before(x), query_valid=valid, carry=side.self_carry, task=task)
        side.self_carry = attended.carry
        x = residual.after(x, side.add(attended))
        residual = self.feed_forward_residual
        return residual.after(x, self.feed_forward(residual.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded source, and feed-forward."""

    def __init__(self, self_attention: Attention, cross_attention: Attention, model: ModelSettings) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = Residual(model)
        self.cross_attention = cross_attention
        self.cross_residual = Residual(model)
        self.feed_forward = FeedForward(model.d_model, model.feed_forward, model.activation, model.activation_dropout)
        self.feed_forward_residual = Residual(model)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        side: Side,
        *,
        valid: Tensor | None,
        memory_valid: Tensor | None,
        memory_carry: Any,
        task: Tensor | None,
    ) -> Tensor:
        """x (B, T, D), memory (B, S, D), valid (B, T), memory_valid (B, S)."""
        residual = self.self_residual
        attended = self.self_attention(
            residual.before(x), query_valid=valid, carry=side.self_carry, memory_carry=memory_carry, task=task
        )
        side.self_carry = attended.carry
        x = residual.after(x, side.add(attended))
        residual = self.cross_residual
        attended = self.cross_attention(
            residual.before(x),
            memory,
            query_valid=valid,
            memory_valid=memory_valid,
            carry=side.cross_carry,
            memory_carry=memory_carry,
            task=task,
        )
        side.cross_carry = attended.carry
        x = residual.after(x, side.add(attended))
        residual = self.feed_forward_residual
        return residual.after(x, self.feed_forward(residual.before(x)))

    def step(self, x: Tensor, state: State, side: Side, *, need_weights: bool) -> tuple[Tensor, State, Tensor | None]:
        """x (B, N, D), the newest token of each hypothesis; weights are those of the attention to the source."""
        residual = self.self_residual
        attended, self_state = self.self_attention.step(residual.before(x), state["self"], carry=side.self_carry)
        side.self_carry = attended.carry
        x = residual.after(x, attended.output)
        residual = self.cross_residual
        attended, cross_state = self.cross_attention.step(
            residual.before(x), state["cross"], carry=side.cross_carry, need_weights=need_weights
        )
        side.cross_carry = attended.carry
        x = residual.after(x, attended.output)
        residual = self.feed_forward_residual
        x = residual.after(x, self.feed_forward(residual.before(x)))
        return x, {"self": self_state, "cross": cross_state}, attended.weights
