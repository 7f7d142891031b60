"""Batches by padded tokens: a plan of an epoch that is a pure function of its seed, and a thread that makes ahead."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtkit.data.prepared import Side, Tokens
from mtkit.data.tokenizer import BOS, EOS

_BUCKET_GROWTH = 1.08
"""Each length bucket is at most this much wider than the one before, so padding stays low and order free."""

Job = TypeVar("Job")

Draw = Callable[[np.ndarray], tuple[Tokens, Tokens]]
"""Another segmentation of the rows asked for: source and target, in the order of the rows."""


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


def plan(
    side: Side, *, batch_tokens: int, max_length: int, seed: int, epoch: int, weights: Sequence[float] | None = None
) -> list[np.ndarray]:
    """The rows of each batch of an epoch, in training order: a pure function of the arguments.

    A batch holds as many rows as keep rows times the wider side (end mark counted) within `batch_tokens`, or a single
    longer row. Rows with more than `max_length` tokens on a side, end mark counted, are left out. Every epoch shuffles
    the rows anew before they are sorted by length buckets of both sides, and then the batches.

    `weights` are those of the corpora that `side.corpora` counts in: every row of a corpus of weight 2.5 is there twice
    and half of them, another half each epoch, a third time.
    """
    source, target = side.source.lengths.astype(np.int64) + 1, side.target.lengths.astype(np.int64) + 1
    wider = np.maximum(source, target)
    rows = np.flatnonzero(wider <= max_length)
    random = np.random.default_rng((seed, epoch))
    if weights is not None and side.corpora is not None:
        rows = _weighted(rows, side.corpora, weights, random)
    elif weights and weights[0] != 1:
        rows = _weighted(rows, np.zeros(len(side), dtype=np.int16), weights, random)
    if len(rows) == 0:
        return []
    rows = random.permutation(rows)
    edges = _edges(int(wider[rows].max()))
    bucket = np.searchsorted(edges, wider[rows])
    key = _sort_key(bucket, np.searchsorted(edges, source[rows]), np.searchsorted(edges, target[rows]), len(edges))
    order = np.argsort(key, kind="stable")
    cuts = _cut(edges[bucket[order]], batch_tokens)
    rows = rows[order]
    batches = [rows[begin:end] for begin, end in pairwise(cuts)]
    return [batches[index] for index in random.permutation(len(batches))]


def make_batch(side: Side, rows: np.ndarray, draw: Draw | None = None) -> Batch:
    """The batch of these rows, padded to the longest of them on each side; in the segmentation of `draw` if given."""
    tokens, places = (side.source, side.target), rows
    if draw is not None:
        tokens, places = draw(rows), np.arange(len(rows))
    source, target = tokens[0].lengths[places] + 1, tokens[1].lengths[places] + 1
    width = int(target.max())
    return Batch(
        source=torch.from_numpy(tokens[0].padded(places, int(source.max()), None, EOS)),
        source_valid=torch.from_numpy(np.arange(source.max()) < source[:, None]),
        target_in=torch.from_numpy(tokens[1].padded(places, width, BOS, None)),
        target_out=torch.from_numpy(tokens[1].padded(places, width, None, EOS)),
        target_valid=torch.from_numpy(np.arange(width) < target[:, None]),
        target_tokens=int(target.sum()),
        lines=side.lines[rows],
        task=None if side.tasks is None else torch.from_numpy(side.tasks[rows].astype(np.int64)),
    )


def prefetched(
    make: Callable[[Job], Batch], jobs: Iterable[Job], *, pin: bool = False, ahead: int = 8
) -> Iterator[Batch]:
    """What `make` gives for each job, as the rows of a plan's batches, made up to `ahead` in advance by a thread.

    `pin` puts the batches in page-locked memory. The thread ends with the loop, also when that is left early; what goes
    wrong in it is raised here.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=ahead)
    left = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not left.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for job in jobs:
                batch = make(job)
                if not put(batch.pinned() if pin else batch):
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


def padding_share(side: Side, batches: list[np.ndarray]) -> float:
    """The share of padding among all source and target positions of a plan, 0 to 1."""
    real = padded = 0
    for rows in batches:
        for lengths in (side.source.lengths[rows], side.target.lengths[rows]):
            real += int(lengths.sum()) + len(rows)
            padded += (int(lengths.max()) + 1) * len(rows)
    return 1 - real / padded if padded else 0.0


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


def _edges(longest: int) -> np.ndarray:
    """Upper edges of the length buckets, up to `longest`: every length at first, then growing ones."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _BUCKET_GROWTH)), longest))
    return np.array(edges, dtype=np.int64)


def _sort_key(wider: np.ndarray, source: np.ndarray, target: np.ndarray, buckets: int) -> np.ndarray:
    """By the wider side's bucket, then by the other's; the second runs back and forth, so that neighbours are near."""
    other = source - target + buckets
    return wider * (2 * buckets + 1) + np.where(wider % 2 == 0, other, 2 * buckets - other)


def _cut(widths: np.ndarray, batch_tokens: int) -> list[int]:
    """Where batches begin and end among rows of non-decreasing widths."""
    cuts = [0]
    while (begin := cuts[-1]) < len(widths):
        most = min(max(batch_tokens // int(widths[begin]), 1), len(widths) - begin)
        # the last row may be wider than the first: as many as its width allows are certain to fit
        cuts.append(begin + min(most, max(batch_tokens // int(widths[begin + most - 1]), 1)))
    return cuts
