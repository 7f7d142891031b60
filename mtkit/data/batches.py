"""Batches of padded tokens: their widths and sizes, their tensors, and a thread that makes them in advance."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtkit.data.prepared import Side
from mtkit.text.tokenizer import BOS, EOS

WIDTH_DIGITS = 5
"""Binary digits before the trailing zeros of a width: 30, 31, 32, 34, ..., 64, 68.

Few widths give few shapes of matrix products, at less than a hundredth more padding. A new shape costs more than its
product: a CPU's library compiles a bfloat16 program per shape, and caches a thousand."""

ROW_DIGITS = 4
"""Binary digits before the trailing zeros of a batch's number of rows, for the same reason: 15, 16, 18, ..., 32, 36."""

_SORTED_ROWS = 1 << 16
"""Rows whose sort keys are computed together: there may be millions."""


def step(number: int, digits: int) -> int:
    """Return the distance between neighbouring numbers of this size with so many digits before their zeros."""
    return 1 << max(number.bit_length() - digits, 0)


def edges_to(longest: int) -> np.ndarray:
    """Return the upper edges of the length buckets, up to `longest`, end mark counted: the widths of batches."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(edges[-1] + step(edges[-1], WIDTH_DIGITS), longest))
    return np.array(edges, dtype=np.int64)


def buckets_of(edges: np.ndarray) -> np.ndarray:
    """Return (longest,) the bucket of each length from 0, end mark not counted."""
    return np.searchsorted(edges, np.arange(1, int(edges[-1]) + 1))


def sort_by_length(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Sort rows of these lengths, end marks not counted; return their places in order of length.

    The order is by the wider side's bucket, then by the difference between the sides' buckets, alternately rising and
    falling so that neighbours are similar.
    """
    edges = edges_to(int(max(source.max(), target.max())) + 1)
    buckets = buckets_of(edges)
    keys = np.empty(len(source), dtype=np.int64)
    for first in range(0, len(keys), _SORTED_ROWS):
        rows = slice(first, first + _SORTED_ROWS)
        source_buckets, target_buckets = buckets[source[rows]], buckets[target[rows]]
        bucket, difference = np.maximum(source_buckets, target_buckets), source_buckets - target_buckets
        bucket = bucket * (2 * len(edges) + 1) + len(edges) + np.where(bucket % 2 == 0, difference, -difference)
        # the place makes the keys of one bucket different, so that any sort keeps their order
        keys[rows] = (bucket << 32) + np.arange(first, first + len(bucket))
    keys.sort()
    keys &= (1 << 32) - 1
    return keys


def widths_of(edges: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return (rows,) the maximum width of each row in order, end mark counted, for so many rows of each bucket."""
    return np.repeat(edges.astype(np.int32), counts)


def sizes_of(widths: np.ndarray, batch_tokens: int) -> np.ndarray:
    """Return (batches,) the number of rows in each batch, for rows of non-decreasing widths.

    Rows times the widest row stay within `batch_tokens`, unless a single row is wider. Row numbers are rounded down to
    `ROW_DIGITS` binary digits.
    """
    sizes, begin = [], 0
    while begin < len(widths):
        left = len(widths) - begin
        most = min(max(batch_tokens // int(widths[begin]), 1), left)
        # the last row may be wider than the first: as many as its width allows are certain to fit
        count = min(most, max(batch_tokens // int(widths[begin + most - 1]), 1))
        # the remaining rows form one batch, as an update on a few rows would learn from noise
        sizes.append(count if count == left else count - count % step(count, ROW_DIGITS))
        begin += sizes[-1]
    return np.array(sizes, dtype=np.int64)


@dataclass(frozen=True)
class Batch:
    """Segments padded to one width a side; B segments, S source and T target width, end marks counted."""

    source: Tensor
    """(B, S) int64: pieces, EOS, padding."""
    source_valid: Tensor
    """(B, S) bool, True for real pieces and EOS."""
    target_in: Tensor
    """(B, T) int64: BOS, pieces, padding."""
    target_out: Tensor
    """(B, T) int64: pieces, EOS, padding."""
    target_valid: Tensor
    """(B, T) bool, the same for target_in and target_out."""
    target_tokens: int
    """Real target pieces, EOS counted: the loss is a mean over them."""
    lines: np.ndarray
    """(B,) int64: lines of the input files, counted from 1."""
    task: Tensor | None = None
    """(B,) int64: the direction of each segment, an index into `Prepared.directions`; None if there is only one."""

    def pin(self) -> "Batch":
        """Return the batch in page-locked memory, from which CUDA copies asynchronously."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.pin_memory() for name, tensor in tensors.items()})

    @property
    def size(self) -> int:
        """Positions of the wider side, padding counted; memory grows with it."""
        return len(self.source) * max(self.source.shape[1], self.target_in.shape[1])

    @property
    def real(self) -> int:
        """Positions of both sides that are not padding."""
        return int(self.source_valid.sum()) + self.target_tokens

    def halves(self) -> "tuple[Batch, Batch]":
        """Split its segments, at least two, into two batches, each padded no wider than it needs."""
        middle = (len(self.source) + 1) // 2
        return self._rows(slice(middle)), self._rows(slice(middle, None))

    def _rows(self, rows: slice) -> "Batch":
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
    """Make the batch of these rows, padded to the longest one of each side.

    With `longest`, the model's maximum, widths are rounded up to `WIDTH_DIGITS` binary digits, at most to `longest`.
    """

    def padded_width(width: int) -> int:
        if longest is None:
            return width
        return max(width, min(width + -width % step(width, WIDTH_DIGITS), longest))

    source, target = side.source.lengths[rows] + 1, side.target.lengths[rows] + 1
    source_width, width = (padded_width(int(lengths.max())) for lengths in (source, target))
    return Batch(
        source=torch.from_numpy(side.source.pad(rows, source_width, None, EOS)),
        source_valid=torch.from_numpy(np.arange(source_width) < source[:, None]),
        target_in=torch.from_numpy(side.target.pad(rows, width, BOS, None)),
        target_out=torch.from_numpy(side.target.pad(rows, width, None, EOS)),
        target_valid=torch.from_numpy(np.arange(width) < target[:, None]),
        target_tokens=int(target.sum()),
        lines=side.lines[rows],
        task=None if side.tasks is None else torch.from_numpy(side.tasks[rows].astype(np.int64)),
    )


def blank_batch(*, several_directions: bool) -> Batch:
    """Make a batch of one segment without pieces."""
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


Job = TypeVar("Job")
Made = TypeVar("Made")


def prefetch(make: Callable[[Job], Made], jobs: Iterable[Job], *, ahead: int = 8) -> Iterator[Made]:
    """Yield the result of `make` for each job, computed up to `ahead` jobs in advance by a thread.

    The thread also iterates over `jobs`. It ends with the loop, even if that is left early; its errors are raised here.
    """
    ready: queue.Queue[Made | BaseException | None] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: Made | BaseException | None) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for job in jobs:
                if stopped.is_set() or not put(make(job)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="mtkit-batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
