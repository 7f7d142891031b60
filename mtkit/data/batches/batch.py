"""A batch: segments padded to one width a side, as tensors."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches.sorting import WIDTH_DIGITS, step
from mtkit.data.prepared import Side
from mtkit.data.tokenizer import BOS, EOS


@dataclass(frozen=True)
class Batch:
    """Segments padded to one width a side; B segments, S source and T target width, end marks counted."""

    source: Tensor
    """(B, S) int64: pieces, EOS, padding."""
    source_valid: Tensor
    """(B, S) bool, True where there is a real piece or EOS."""
    target_in: Tensor
    """(B, T) int64: BOS, pieces, padding."""
    target_out: Tensor
    """(B, T) int64: pieces, EOS, padding."""
    target_valid: Tensor
    """(B, T) bool, the same for target_in and target_out."""
    target_tokens: int
    """Real target pieces, EOS counted: what the loss is a mean over."""
    lines: np.ndarray
    """(B,) int64: lines of the input files, counted from 1."""
    task: Tensor | None = None
    """(B,) int64: the direction of each segment, its place in `Prepared.directions`; None where there is only one."""

    def pinned(self) -> "Batch":
        """The batch in page-locked memory, from which CUDA copies without waiting."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        pinned: dict[str, Any] = {name: each.pin_memory() for name, each in values.items() if isinstance(each, Tensor)}
        return replace(self, **pinned)

    @property
    def size(self) -> int:
        """Positions, padding counted, of the wider side: what memory grows with."""
        return len(self.source) * max(self.source.shape[1], self.target_in.shape[1])

    def halves(self) -> "tuple[Batch, Batch]":
        """Its segments in two batches, each padded no wider than it needs; at least two segments are there."""
        middle = (len(self.source) + 1) // 2
        return self._part(slice(middle)), self._part(slice(middle, None))

    def _part(self, rows: slice) -> "Batch":
        source, target = (int(valid[rows].sum(1).max()) for valid in (self.source_valid, self.target_valid))
        return Batch(
            source=self.source[rows, :source],
            source_valid=self.source_valid[rows, :source],
            target_in=self.target_in[rows, :target],
            target_out=self.target_out[rows, :target],
            target_valid=self.target_valid[rows, :target],
            target_tokens=int(self.target_valid[rows].sum()),
            lines=self.lines[rows],
            task=None if self.task is None else self.task[rows],
        )


def make_batch(side: Side, rows: np.ndarray, longest: int | None = None) -> Batch:
    """The batch of these rows, padded to the longest of them on each side.

    With `longest`, the most that the model takes, to the next of few widths, if it is no wider than that.
    """
    source, target = side.source.lengths[rows] + 1, side.target.lengths[rows] + 1
    source_width, width = (_width(int(lengths.max()), longest) for lengths in (source, target))
    return Batch(
        source=torch.from_numpy(side.source.padded(rows, source_width, None, EOS)),
        source_valid=torch.from_numpy(np.arange(source_width) < source[:, None]),
        target_in=torch.from_numpy(side.target.padded(rows, width, BOS, None)),
        target_out=torch.from_numpy(side.target.padded(rows, width, None, EOS)),
        target_valid=torch.from_numpy(np.arange(width) < target[:, None]),
        target_tokens=int(target.sum()),
        lines=side.lines[rows],
        task=None if side.tasks is None else torch.from_numpy(side.tasks[rows].astype(np.int64)),
    )


def blank_batch(*, several_directions: bool) -> Batch:
    """A batch of one segment without pieces."""
    end, real = torch.tensor([[EOS]]), torch.tensor([[True]])
    return Batch(
        source=end,
        source_valid=real,
        target_in=torch.tensor([[BOS]]),
        target_out=end,
        target_valid=real,
        target_tokens=1,
        lines=np.zeros(1, dtype=np.int64),
        task=torch.tensor([0]) if several_directions else None,
    )


def _width(width: int, longest: int | None) -> int:
    """The next width of few digits, where no wider than `longest`."""
    return width if longest is None else max(width, min(width + -width % step(width, WIDTH_DIGITS), longest))
