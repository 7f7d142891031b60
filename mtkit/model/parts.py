"""A large batch is encoded in parts on the CPU, each as wide as its own longest segment, and small enough for caches.

The segments of a batch come longest first, so that parts leave out most of its padding.
"""

from typing import Protocol

import torch
from torch import Tensor

from mtkit.model.network import Encoded

TOGETHER = 1024
"""Padded pieces that a thread encodes at a time."""


class Encode(Protocol):
    """source (B, S), source_valid (B, S), padded on the right, and task (B,) to the encoded batch."""

    def __call__(self, source: Tensor, source_valid: Tensor | None, *, task: Tensor | None) -> Encoded: ...


def encoded_in_parts(encode: Encode, source: Tensor, valid: Tensor | None, task: Tensor | None) -> Encoded | None:
    """The encoded batch; None where parts save nothing, and where attentions carry out what would have to be joined."""
    room = TOGETHER * torch.get_num_threads()
    if valid is None or source.device.type != "cpu" or source.numel() < 2 * room or torch.is_grad_enabled():
        return None
    lengths, memory, first = valid.sum(1).tolist(), None, 0
    while first < len(lengths):
        count = max(1, room // max(lengths[first], 1))
        some, longest = slice(first, first + count), max(1, *lengths[first : first + count])
        part = encode(source[some, :longest], valid[some, :longest], task=None if task is None else task[some])
        if part.carry is not None or part.losses or part.log_prob is not None:
            return None
        if memory is None:
            memory = part.memory.new_zeros(*source.shape, part.memory.shape[2])
        memory[some, :longest] = part.memory
        first += count
    return None if memory is None else Encoded(memory, valid, None, task)
