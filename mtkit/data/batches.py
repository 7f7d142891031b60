"""Batches by padded tokens: a plan of an epoch that is a pure function of its seed, and a thread that makes ahead."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtkit.data.prepared import Side
from mtkit.data.tokenizer import BOS, EOS

WIDTH_DIGITS = 5
"""Binary digits before the zeros of a width: 30, 31, 32, 34, ..., 64, 68. So few widths make few shapes of matrix
products, at less than a hundredth more padding. A new shape costs more than its product: a CPU's library writes a
program for each in bfloat16, and keeps a thousand."""

ROW_DIGITS = 4
"""Binary digits before the zeros of a batch's number of rows, for the same reason: 15, 16, 18, ..., 32, 36."""

Job = TypeVar("Job")
Made = TypeVar("Made")


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


@dataclass(frozen=True)
class EpochPart:
    """Rows of an epoch that are sorted by length together and cut into batches."""

    rows: np.ndarray
    """(rows,) row numbers in the order in which they were drawn."""
    copies: np.ndarray
    """(rows,) how often each came before in the epoch; 0 but for corpora of weight above 1."""
    sizes: np.ndarray
    """(batches,) rows of each batch, that of the shortest segments first."""
    order: np.ndarray
    """(batches,) training order of the batches."""

    def batches(self, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
        """Places among `rows` of each batch, in training order, where the rows have these lengths (rows,).

        They need not be the lengths that the part was planned by: as many rows go into each batch, but others.
        """
        cuts = np.cumsum([0, *self.sizes])
        order, _ = _sorted(source, target)
        return [order[cuts[batch] : cuts[batch + 1]] for batch in self.order]

    def planned(self, side: Side) -> list[np.ndarray]:
        """The rows of each batch, in training order, by the lengths that they have in `side`."""
        places = self.batches(side.source.lengths[self.rows], side.target.lengths[self.rows])
        return [self.rows[each] for each in places]


def plan(
    side: Side, *, batch_tokens: int, max_length: int, seed: int, epoch: int, weights: Sequence[float] | None = None
) -> list[np.ndarray]:
    """The rows of each batch of an epoch, in training order: a pure function of the arguments.

    A batch holds as many rows as keep rows times the wider side (end mark counted) within `batch_tokens`, rounded down
    to `ROW_DIGITS` binary digits, or a single longer row. Rows with more than `max_length` tokens on a side, end mark
    counted, are left out. Every epoch shuffles the rows anew before they are sorted by length buckets of both sides,
    and then the batches.

    `weights` are those of the corpora that `side.corpora` counts in: every row of a corpus of weight 2.5 is there twice
    and half of them, another half each epoch, a third time.
    """
    parts = plan_parts(side, batch_tokens=batch_tokens, max_length=max_length, seed=seed, epoch=epoch, weights=weights)
    return [rows for part in parts for rows in part.planned(side)]


def plan_parts(
    side: Side,
    *,
    batch_tokens: int,
    max_length: int,
    seed: int,
    epoch: int,
    weights: Sequence[float] | None = None,
    pieces: int | None = None,
) -> list[EpochPart]:
    """The plan of an epoch in parts that come one after the other, of about `pieces` pieces per side; one part if None.

    How many batches a part has is known without its pieces.
    """
    wider = np.maximum(side.source.lengths, side.target.lengths)
    # numbers of rows in four bytes, and few arrays of all rows at once: a large side has a hundred million
    rows = np.flatnonzero(wider < max_length).astype(np.int32 if len(side) <= np.iinfo(np.int32).max else np.int64)
    random = np.random.default_rng((seed, epoch))
    if weights is not None and side.corpora is not None:
        rows = _weighted(rows, side.corpora, weights, random)
    elif weights and weights[0] != 1:
        rows = _weighted(rows, np.zeros(len(side), dtype=np.int16), weights, random)
    if len(rows) == 0:
        return []
    random.shuffle(rows)
    copies = _copies(rows) if max(weights or [1]) > 1 else np.zeros(len(rows), dtype=np.int8)
    count = (
        1
        if pieces is None
        else min(max(1, round((int(wider[rows].sum(dtype=np.int64)) + len(rows)) / pieces)), len(rows))
    )
    del wider
    parts = []
    for part, again in zip(np.array_split(rows, count), np.array_split(copies, count), strict=True):
        _, widths = _sorted(side.source.lengths[part], side.target.lengths[part])
        sizes = np.diff(_cut(widths, batch_tokens))
        parts.append(EpochPart(part, again, sizes, random.permutation(len(sizes))))
    return parts


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


def _weighted(
    rows: np.ndarray, corpora: np.ndarray, weights: Sequence[float], random: np.random.Generator
) -> np.ndarray:
    """The rows as often as their corpus's weight says; which of them serve its fraction is drawn."""
    chosen, corpus = [], corpora[rows]
    for number, weight in enumerate(weights):
        own = rows[corpus == number]
        whole = int(weight)
        part = random.permutation(own)[: round((weight - whole) * len(own))]
        chosen += [np.tile(own, whole), part]
    return np.concatenate(chosen)


def _copies(rows: np.ndarray) -> np.ndarray:
    """How often each row came before."""
    order = np.argsort(rows, kind="stable")
    same = np.diff(rows[order], prepend=-1) == 0
    places = np.arange(len(rows))
    copies = np.empty(len(rows), dtype=np.int64)
    copies[order] = places - np.maximum.accumulate(np.where(same, 0, places))
    return copies


def _width(width: int, longest: int | None) -> int:
    """The next width of few digits, where no wider than `longest`."""
    return width if longest is None else max(width, min(width + -width % _step(width, WIDTH_DIGITS), longest))


def _step(number: int, digits: int) -> int:
    """Between neighbours of a number's size that have so many binary digits before their zeros."""
    return 1 << max(number.bit_length() - digits, 0)


def _edges(longest: int) -> np.ndarray:
    """Upper edges of the length buckets, up to `longest`: the widths of batches."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(edges[-1] + _step(edges[-1], WIDTH_DIGITS), longest))
    return np.array(edges, dtype=np.int64)


def _sorted(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of rows of these lengths, end marks not counted, in order of length, and the width of each row.

    The order is by the wider side's bucket, then by the difference of the sides' buckets; that runs back and forth, so
    that neighbours are near. The width of a row is at most that of its bucket, end mark counted, and non-decreasing.
    """
    longest = int(max(source.max(), target.max())) + 1
    edges = _edges(longest)
    small = np.uint16 if len(edges) * (2 * len(edges) + 1) < 1 << 16 else np.int64
    buckets = np.searchsorted(edges, np.arange(1, longest + 1)).astype(small)  # of each length
    own, other = buckets[source], buckets[target]
    bucket = np.maximum(own, other)
    across = own + small(len(edges)) - other
    across = np.where(bucket % 2 == 0, across, small(2 * len(edges)) - across)
    # of numbers of two bytes, the stable sort is one by digits
    order = np.argsort(bucket * small(2 * len(edges) + 1) + across, kind="stable")
    return order, edges.astype(np.int32)[bucket[order]]


def _cut(widths: np.ndarray, batch_tokens: int) -> list[int]:
    """Where batches begin and end among rows of non-decreasing widths."""
    cuts = [0]
    while (begin := cuts[-1]) < len(widths):
        left = len(widths) - begin
        most = min(max(batch_tokens // int(widths[begin]), 1), left)
        # the last row may be wider than the first: as many as its width allows are certain to fit
        count = min(most, max(batch_tokens // int(widths[begin + most - 1]), 1))
        # what is left at the end goes together, as an update on a few rows would learn from noise
        cuts.append(begin + (count if count == left else count - count % _step(count, ROW_DIGITS)))
    return cuts
