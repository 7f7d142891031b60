"""Detection of divergence: a loss that stays far above the loss of a model that has learned nothing."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from mtkit.training.progress import Progress


class Divergence:
    """Detects a training whose loss is finite, but stays far above the loss of an untrained model.

    The bound is `FACTOR` times the larger of two losses: a uniform guess over the vocabulary, and the first update,
    before any weight has changed. A training that learns, however slowly, stays below it, and a training that recovers
    from a spike is below it again within a few updates. `UPDATES` updates in a row above it are divergence. All numbers
    stay on the device until they are read.
    """

    FACTOR = 2.0
    UPDATES = 50

    def __init__(self, vocabulary: int, device: torch.device, progress: Progress) -> None:
        """`vocabulary` is the number of target pieces; `progress` is where training begins or resumes."""
        self._uniform = math.log(vocabulary)
        first = math.nan if progress.first_nll is None else progress.first_nll
        self._first = torch.tensor(first, device=device)
        self._above = torch.tensor(progress.diverging, device=device)
        self._since = torch.zeros((), dtype=torch.int64, device=device)

    def follow(self, nll: Tensor, number: int) -> None:
        """Record the mean loss per target token (scalar, without label smoothing) of update `number`."""
        self._first = torch.where(self._first.isnan(), nll, self._first)
        above = nll > self.FACTOR * self._first.clamp(min=self._uniform)
        self._above = torch.where(above, self._above + 1, 0)
        since = torch.where(self._above >= self.UPDATES, number + 1 - self._above, 0)
        self._since = torch.where(self._since == 0, since, self._since)

    def since(self) -> int | None:
        """Return the first of the updates that show the divergence; None if there is none. Waits for the device."""
        return int(self._since) or None

    def describe(self) -> str | None:
        """Describe the divergence in one sentence; None if there is none. Waits for the device."""
        if (since := self.since()) is None:
            return None
        bound, name = max(
            (self._uniform, "a uniform guess over the vocabulary"), (float(self._first), "the first update")
        )
        return (
            f"training has diverged: from update {since} on, the loss is above {self.FACTOR * bound:.1f} nats per "
            f"target token, {self.FACTOR:g} times the loss of {name}"
        )

    def save_state(self, progress: Progress) -> Progress:
        """Return the progress with the state of this object. Waits for the device."""
        first = float(self._first)
        return replace(progress, first_nll=None if math.isnan(first) else first, diverging=int(self._above))
