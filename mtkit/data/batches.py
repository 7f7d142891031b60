"""Rows of two lengths in order of length, and where batches end among them.

A batch: segments padded to one width a side, as tensors.

A thread that makes ahead what a loop is going to ask for.
"""

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
"""Binary digits before the zeros of a width: 30, 31, 32, 34, ..., 64, 68. So few widths make few shapes of matrix
products, at less than a hundredth more padding. A new shape costs more than its product: a CPU's library writes a
program for each in bfloat16, and keeps a thousand."""

ROW_DIGITS = 4
"""Binary digits before the zeros of a batch's number of rows, for the same reason: 15, 16, 18, ..., 32, 36."""

_TOGETHER = 1 << 16


def step(number: int, digits: int) -> int:
    """Between neighbours of a number's size that have so many binary digits before their zeros."""
    return 1 << max(number.bit_length() - digits, 0)


def edges_to(longest: int) -> np.ndarray:
    """Upper edges of the length buckets, up to `longest`, end mark counted: the widths of batches."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(edges[-1] + step(edges[-1], WIDTH_DIGITS), longest))
    return np.array(edges, dtype=np.int64)


def buckets_of(edges: np.ndarray) -> np.ndarray:
    """(longest,) the bucket of each length from 0, end mark not counted."""
    return np.searchsorted(edges, np.arange(1, int(edges[-1]) + 1))


def in_order(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The places of rows of these lengths, end marks not counted, in order of length.

    The order is by the wider side's bucket, then by the difference of the sides' buckets; that runs back and forth, so
    that neighbours are near.
    """
    edges = edges_to(int(max(source.max(), target.max())) + 1)
    buckets = buckets_of(edges)
    keys = np.empty(len(source), dtype=np.int64)
    for first in range(0, len(keys), _TOGETHER):  # few arrays of all rows at once: there may be millions
        some = slice(first, first + _TOGETHER)
        own, other = buckets[source[some]], buckets[target[some]]
        bucket, across = np.maximum(own, other), own - other
        bucket = bucket * (2 * len(edges) + 1) + len(edges) + np.where(bucket % 2 == 0, across, -across)
        # the place makes keys of one bucket different, so that any sort keeps their order
        keys[some] = (bucket << 32) + np.arange(first, first + len(own))
    keys.sort()
    keys &= (1 << 32) - 1
    return keys


def widths_of(edges: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(rows,) the widths of so many rows of each bucket, in order: no row is wider than that, end mark counted."""
    return np.repeat(edges.astype(np.int32), counts)


def sizes_of(widths: np.ndarray, batch_tokens: int) -> np.ndarray:
    """(batches,) how many rows go into each batch, of rows of non-decreasing widths.

    Rows times the widest of them stay within `batch_tokens`, or a single row is wider; their number is rounded down to
    `ROW_DIGITS` binary digits.
    """
    sizes, begin = [], 0
    while begin < len(widths):
        left = len(widths) - begin
        most = min(max(batch_tokens // int(widths[begin]), 1), left)
        # the last row may be wider than the first: as many as its width allows are certain to fit
        count = min(most, max(batch_tokens // int(widths[begin + most - 1]), 1))
        # what is left at the end goes together, as an update on a few rows would learn from noise
        sizes.append(count if count == left else count - count % step(count, ROW_DIGITS))
        begin += sizes[-1]
    return np.array(sizes, dtype=np.int64)


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


Job = TypeVar("Job")
Made = TypeVar("Made")


def prefetched(make: Callable[[Job], Made], jobs: Iterable[Job], *, ahead: int = 8) -> Iterator[Made]:
    """What `make` gives for each job, made up to `ahead` in advance by a thread, which goes through the jobs as well.

    The thread ends with the loop, also when that is left early; what goes wrong in it is raised here.
    """
    ready: queue.Queue[Made | BaseException | None] = queue.Queue(maxsize=ahead)
    left = threading.Event()

    def put(item: Made | BaseException | None) -> bool:
        while not left.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for job in jobs:
                if left.is_set() or not put(make(job)):
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
        left.set()
        thread.join()
