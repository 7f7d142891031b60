"""The logits of the next pieces, computed when they are read, and as many at a time as the cache holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

TOGETHER = 64
"""Hypotheses whose logits are computed at a time, at most, unless one segment has more."""


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

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """The logits (B', N, V) of some segments after the others, and which they are."""
        segments, hypotheses = self.hidden.shape[:2]
        most = max(TOGETHER // hypotheses, 1)
        for first in range(0, segments, most):
            some = slice(first, first + most)
            yield some, self.project(self.hidden[some])
