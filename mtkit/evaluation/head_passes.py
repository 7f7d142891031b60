"""Passes of a network over one batch with given targets, and heads that are switched off in them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.attention import Attended, Attention
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.mixed_heads import MixedHeads
from mtkit.data.batches import Batch
from mtkit.decoding.engines.model_engine import piece_log_probs
from mtkit.model.layers import Weights
from mtkit.model.network import Encoded, Network, Output


@contextmanager
def switched_off(attention: Attention, head: int) -> Iterator[None]:
    """A context in which the output of one head is zero before `out_proj`, or before the heads are merged."""
    if isinstance(attention, MixedHeads):
        attention, first = next(entry for entry in reversed(attention.firsts()) if entry[1] <= head)
        head -= first
    with ExitStack() as stack:
        parts = [part for part in attention.modules() if isinstance(part, HeadAttention)]
        for part in parts:
            stack.callback(_zero_head(part, head).remove)
        if not parts:
            stack.callback(attention.register_forward_hook(_zero_output).remove)
        yield


def _zero_head(part: HeadAttention, head: int) -> Any:
    width = part.projection.value_width

    def zeroed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = inputs[0].clone()
        if part.merge is not None:  # (B, H, T, V)
            heads[:, head] = 0.0
        else:  # (..., H V)
            heads[..., head * width : (head + 1) * width] = 0.0
        return (heads, *inputs[1:])

    return (part.out_proj if part.merge is None else part.merge).register_forward_pre_hook(zeroed)


def _zero_output(_: nn.Module, __: Any, attended: Attended) -> Attended:
    attended.output = torch.zeros_like(attended.output)
    return attended


class BatchPass:
    """Passes of the network over one batch; the encoded source is kept for heads that do not change it."""

    def __init__(self, network: Network, batch: Batch, device: torch.device) -> None:
        self.network = network
        moved = {name: getattr(batch, name) for name in ("source", "source_valid", "target_in", "target_valid")}
        moved = {name: tensor.to(device) for name, tensor in moved.items()}
        self.source, self.source_valid = moved["source"], moved["source_valid"]
        self.target_in, self.target_valid = moved["target_in"], moved["target_valid"]
        self.target_out = batch.target_out.to(device)
        self.task = None if batch.task is None else batch.task.to(device)
        self.encoded: Encoded | None = None

    def encode(self, weights: Weights | None = None) -> Encoded:
        lengths = self.source_valid.sum(1).cpu()
        return self.network.encode(
            self.source, self.source_valid, source_lengths=lengths, task=self.task, weights=weights
        )

    def losses(self, weights: Weights | None = None, *, again: bool = False) -> Tensor:
        """Return the negative log-likelihood (B,) of each target, in nats; `again`: encode the source again."""
        encoded = self.encode(weights) if again or self.encoded is None else self.encoded
        self.encoded = self.encoded or encoded
        output: Output = self.network.decode(encoded, self.target_in, self.target_valid, weights)
        valid, losses = self.target_valid, torch.zeros(self.target_out.shape, device=self.source.device)
        losses[valid] = -piece_log_probs(self.network, output.hidden[valid], self.target_out[valid])
        return losses.double().sum(1).cpu()
