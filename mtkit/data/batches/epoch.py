"""The plan of an epoch: which rows each batch has, a pure function of a seed; a large side is planned by windows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.batches import windows
from mtkit.data.batches.batch import buckets_of, edges_to, in_order, sizes_of, widths_of
from mtkit.data.prepared import Side


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
        return self._cut(in_order(source, target))

    def planned(self, side: Side) -> list[np.ndarray]:
        """The rows of each batch, in training order, by the lengths that they have in `side`."""
        return self._cut(self.rows[in_order(side.source.lengths[self.rows], side.target.lengths[self.rows])])

    def _cut(self, rows: np.ndarray) -> list[np.ndarray]:
        cuts = np.cumsum([0, *self.sizes])
        return [rows[cuts[batch] : cuts[batch + 1]] for batch in self.order]


@dataclass(frozen=True)
class EpochPlan:
    """An epoch in windows that come one after the other, each in parts; rows of a window are drawn when it is due."""

    sizes: Sequence[int]
    """Batches of each window."""
    heaviest: Sequence[int]
    """Windows that have the batch of most tokens, and that of the widest rows."""
    draw: Callable[[int], Sequence[EpochPart]]
    """Draws the parts of a window."""

    @property
    def batches(self) -> int:
        """How many there are, known without drawing."""
        return sum(self.sizes)

    def parts(self, begin: int = 0) -> Iterator[tuple[EpochPart, int]]:
        """The parts from the one that has batch `begin`, counted from 0, and how many batches of each come before it.

        What it takes does not grow with `begin`: windows before it are not drawn.
        """
        for window, batches in enumerate(self.sizes):
            if begin >= batches:
                begin -= batches
                continue
            for part in self.draw(window):
                if begin >= len(part.sizes):
                    begin -= len(part.sizes)
                    continue
                yield part, begin
                begin = 0


def plan(
    side: Side, *, batch_tokens: int, max_length: int, seed: int, epoch: int, weights: Sequence[float] | None = None
) -> list[np.ndarray]:
    """The rows of each batch of an epoch, in training order: a pure function of the arguments.

    A batch holds as many rows as keep rows times the wider side (end mark counted) within `batch_tokens`, rounded down
    to `ROW_DIGITS` binary digits, or a single longer row. Rows with more than `max_length` tokens on a side, end mark
    counted, are left out. Every epoch shuffles the rows anew before they are sorted by length buckets of both sides,
    and then the batches. Of more rows than `windows.WINDOW`, blocks are shuffled, and then the rows of each window.

    `weights` are those of the corpora that `side.corpora` counts in: every row of a corpus of weight 2.5 is there twice
    and half of them, another half each epoch, a third time.
    """
    found = plan_epoch(side, batch_tokens=batch_tokens, max_length=max_length, seed=seed, epoch=epoch, weights=weights)
    return [rows for part, _ in found.parts() for rows in part.planned(side)]


def plan_epoch(
    side: Side,
    *,
    batch_tokens: int,
    max_length: int,
    seed: int,
    epoch: int,
    weights: Sequence[float] | None = None,
    pieces: int | None = None,
) -> EpochPlan:
    """The plan of an epoch, in parts of about `pieces` pieces per side; one part for each window if None."""
    if max(len(side), _drawn_rows(side, weights)) > windows.WINDOW:
        blocks = windows.RowBlocks(side, max_length)
        layout = windows.EpochLayout(
            blocks, batch_tokens=batch_tokens, seed=seed, epoch=epoch, weights=weights, pieces=pieces
        )
        return EpochPlan(
            layout.batches, layout.heaviest, lambda window: [EpochPart(*part) for part in layout.draw(window)]
        )
    parts = _whole(side, batch_tokens, max_length, np.random.default_rng((seed, epoch)), weights, pieces)
    return EpochPlan([sum(len(part.sizes) for part in parts)], [0], lambda _: parts)


def _drawn_rows(side: Side, weights: Sequence[float] | None) -> float:
    """About how many rows an epoch of a side has that is no larger than a window."""
    if not weights or len(side) > windows.WINDOW:
        return len(side)
    if side.corpora is None:
        return weights[0] * len(side)
    return float(np.bincount(side.corpora[:], minlength=len(weights)) @ np.array(weights))


def _whole(
    side: Side,
    batch_tokens: int,
    max_length: int,
    random: np.random.Generator,
    weights: Sequence[float] | None,
    pieces: int | None,
) -> list[EpochPart]:
    """The parts of an epoch that is one window."""
    wider = np.maximum(side.source.lengths, side.target.lengths)
    rows = np.flatnonzero(wider < max_length).astype(np.int32)
    if weights is not None and side.corpora is not None:
        rows = _weighted(rows, side.corpora[:], weights, random)
    elif weights and weights[0] != 1:
        rows = _weighted(rows, np.zeros(len(side), dtype=np.int16), weights, random)
    if len(rows) == 0:
        return []
    random.shuffle(rows)
    copies = _copies(rows) if max(weights or [1]) > 1 else np.zeros(len(rows), dtype=np.int8)
    total = int(wider[rows].sum(dtype=np.int64)) + len(rows)
    count = 1 if pieces is None else min(max(1, round(total / pieces)), len(rows))
    parts = []
    for part, again in zip(np.array_split(rows, count), np.array_split(copies, count), strict=True):
        edges = edges_to(int(wider[part].max()) + 1)
        counts = np.bincount(buckets_of(edges)[wider[part]], minlength=len(edges))
        sizes = sizes_of(widths_of(edges, counts), batch_tokens)
        parts.append(EpochPart(part, again, sizes, random.permutation(len(sizes))))
    return parts


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
