"""Operations that training and decoding require, counted segment by segment to exclude padding.

They are counted in the model's own forward pass and steps, whatever a program does to be faster. A multiplication with
its addition counts as two. A backward pass takes twice the operations of its forward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mtkit.attention import State
from mtkit.benchmark.cost import flops_of
from mtkit.data.batches import make_batch
from mtkit.data.prepared import Side
from mtkit.data.tokenizer import BOS
from mtkit.model.network import Network

T = TypeVar("T")

SAMPLE = 24
"""Number of segments that are counted, of all lengths."""


@torch.no_grad()
def training_operations(model: Network, side: Side, rows: np.ndarray) -> float:
    """Return the mean forward and backward operations per target token, over a sample of these rows."""
    training, device = model.training, model.output_weight.device
    model.eval()
    operations, tokens = 0, 0
    for row in spread(rows[np.argsort(side.target.lengths[rows], kind="stable")].tolist()):
        batch = make_batch(side, np.array([row]))
        source, target_in = batch.source.to(device), batch.target_in.to(device)
        task = None if batch.task is None else batch.task.to(device)
        forward = partial(_forward, model, source, target_in, task)
        operations += 3 * flops_of(forward)
        tokens += batch.target_tokens
    model.train(training)
    return operations / tokens


@torch.no_grad()
def decoding_operations(model: Network, segments: Sequence[tuple[int, int]], beam: int) -> float:
    """Return the mean operations of decoding a segment, over a sample of `segments` (source pieces, target pieces).

    Each source is encoded once. One hypothesis takes the first step; `beam` hypotheses take one step for each further
    piece of the translation.
    """
    device, chosen = model.output_weight.device, spread(sorted(segments, key=sum))
    return sum(_decode(model, *each, beam, device) for each in chosen) / len(chosen)


def spread(items: Sequence[T]) -> list[T]:
    """Return up to SAMPLE items, evenly spaced."""
    count = min(SAMPLE, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def _forward(model: Network, source: Tensor, target_in: Tensor, task: Tensor | None) -> Tensor:
    return model(source, target_in, task=task).hidden @ model.output_weight.t()


def _decode(model: Network, source: int, target: int, beam: int, device: torch.device) -> float:
    """Count the first and last step; assume linear growth between them, and in the number of hypotheses."""
    pieces = torch.full((1, source), BOS, device=device)
    token = torch.full((1, 1), BOS, device=device)  # with several tokens, attention may mask more than it needs
    state: State = {}

    def start() -> None:
        nonlocal state
        state = model.start(model.encode(pieces))

    def step() -> None:
        nonlocal state
        logits, state, _ = model.step(token, state)
        logits.whole()

    begin, first = flops_of(start), flops_of(step)
    for _ in range(target - 2):
        step()
    last = flops_of(step) if target > 1 else first
    return begin + first + beam * (target * (first + last) / 2 - first) if target else begin
