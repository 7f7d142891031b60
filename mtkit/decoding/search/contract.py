"""The contract of searches: model, source batch, hypotheses, and the removal of finished segments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtkit.model.network import Model
from mtkit.text.tokenizer import EOS, PAD

NEVER_GENERATED = EOS
"""Pieces below this id, PAD, UNK and BOS, are never generated."""

CHECK_EVERY = 4
"""Steps from one look at what has finished to the next on an accelerator, where each look waits for the device."""

WORTHWHILE, ENOUGH = 0.2, 8
"""Finished segments leave the batch when they are this share of it, or so many."""


class StoppedError(Exception):
    """A search whose result is no longer wanted (`SourceBatch.stopped`)."""


@dataclass(frozen=True)
class SourceBatch:
    """Source segments to decode together."""

    source: Tensor
    """(B, S) pieces with EOS at the end, padded on the right."""
    limits: list[int]
    """For each segment, the pieces a hypothesis may have at most, EOS counted: its own, whatever the batch."""
    keys: Tensor
    """(B,) integers that tell segments apart; sampling draws by them, so that a draw does not depend on the batch."""
    task: Tensor | None = None
    """(B,) the direction of each segment, where the model knows several."""
    pieces: Tensor | None = None
    """(K,) ids of the pieces that may come, PAD, UNK, BOS and EOS first, as in the vocabulary; None: all may.
    The search calls a piece by its place among them."""
    stopped: Callable[[], bool] | None = None
    """Returns whether the result is no longer wanted; called at each step. None: it is always wanted."""

    def check(self) -> None:
        """Raises: StoppedError if the result is no longer wanted."""
        if self.stopped is not None and self.stopped():
            raise StoppedError

    @cached_property
    def valid(self) -> Tensor:
        """(B, S), True at real pieces."""
        return self.source != PAD

    @cached_property
    def longest(self) -> int:
        """The maximum number of steps of the search."""
        return max(self.limits)

    @cached_property
    def limit(self) -> Tensor:
        """The limits (B,), on the device."""
        return torch.tensor(self.limits, device=self.source.device)


@dataclass(frozen=True)
class Hypotheses:
    """N hypotheses for each of B segments, best first; a log-probability of -inf marks one that does not exist."""

    pieces: Tensor
    """(B, N, L), EOS included, PAD behind it."""
    log_probs: Tensor
    """(B, N) float32, the model's log-probability of the pieces, EOS included; among those that may come."""
    scores: Tensor
    """(B, N) float32, what they are ranked by."""

    @property
    def lengths(self) -> Tensor:
        """(B, N) pieces, EOS counted."""
        return (self.pieces != PAD).sum(-1)

    def named(self, pieces: Tensor | None) -> "Hypotheses":
        """The same hypotheses with piece ids, where the search used places among `pieces` (K,)."""
        return self if pieces is None else replace(self, pieces=pieces[self.pieces])

    def ranked(self) -> "Hypotheses":
        """The same hypotheses, those of each segment by descending score; equal scores keep their order."""
        order = self.scores.argsort(dim=1, descending=True, stable=True)
        pieces = self.pieces.gather(1, order[..., None].expand_as(self.pieces))
        return Hypotheses(pieces, self.log_probs.gather(1, order), self.scores.gather(1, order))


def begin(model: Model, batch: SourceBatch, hypotheses: int) -> Any:
    """The state of the model before the first piece of each segment's hypotheses."""
    # of its own, because the state may hold it, and segments that leave the batch are written over (`close_gaps`)
    valid, task = batch.valid.clone(), None if batch.task is None else batch.task.clone()
    encoded = model.encode(batch.source, valid, task=task)
    return model.start(encoded, hypotheses=hypotheses, pieces=batch.pieces)


def ending(batch: SourceBatch, rows: Tensor, step: int) -> Tensor | None:
    """Which of the segments `rows` (B',) of the batch are at their limit, so that EOS must come; None: none.

    (B',); `step` counts from 0.
    """
    return batch.limit[rows] <= step + 1 if step + 1 in batch.limits else None


def restrict(scores: Tensor, ends: Tensor | None) -> None:
    """Sets the scores (B, N, V) of forbidden pieces to -inf, in place: marks that are never generated, and where a
    segment `ends` (B,), all but EOS.
    """
    scores[..., :NEVER_GENERATED] = -torch.inf
    if ends is not None:
        scores[..., EOS + 1 :].masked_fill_(ends[:, None, None], -torch.inf)


def still_running(done: Tensor, step: int) -> Tensor | None:
    """The rows of unfinished segments if dropping the others saves time, else None; empty: all are finished.

    done (B',), True where a segment has finished. The rows are in the order of `close_gaps`.
    """
    if done.is_cuda and (step + 1) % CHECK_EVERY:
        return None
    running = (~done).nonzero().squeeze(1)
    count = len(running)
    if len(done) - count < min(ENOUGH, WORTHWHILE * len(done)):
        return None
    order = torch.arange(count, device=done.device)
    order[done[:count]] = running[running >= count]
    return order
