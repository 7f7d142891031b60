"""The logits of the next pieces, computed when they are read, and as many at a time as the cache holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

TOGETHER = 64
"""Hypotheses whose logits are computed at a time, at most, unless one segment has more."""


@runtime_checkable
class InUnits(Protocol):
    """A projection that has its result in units of each row first; to leave it there saves a pass over it."""

    def in_units(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., I) to sums (..., O), units (...) and what is added (O,): sums * units + added is the result."""


@dataclass(frozen=True)
class Logits:
    """The logits (B, N, V) of the pieces that may follow each hypothesis."""

    hidden: Tensor
    """(B, N, D), what they are computed from."""
    project: Callable[[Tensor], Tensor]
    """hidden (..., D) to new logits (..., V) in float32."""
    pieces: int
    """V."""

    @classmethod
    def known(cls, logits: Tensor) -> "Logits":
        """Logits (B, N, V) that have been computed."""
        return cls(logits, lambda known: known, logits.shape[2])

    def whole(self) -> Tensor:
        """All logits (B, N, V) in float32, which may be overwritten."""
        return self.project(self.hidden)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """The logits of some segments after the others: which they are, and as `InUnits` has them, sums (B', N, V)."""
        segments, hypotheses = self.hidden.shape[:2]
        most = max(TOGETHER // hypotheses, 1)
        in_units = self.project.in_units if isinstance(self.project, InUnits) else self._in_ones
        for first in range(0, segments, most):
            some = slice(first, first + most)
            yield some, *in_units(self.hidden[some])

    def _in_ones(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.project(hidden)
        return logits, logits.new_ones(hidden.shape[:2]), logits.new_zeros(self.pieces)
