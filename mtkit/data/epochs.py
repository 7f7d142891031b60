"""The plan of an epoch: which rows each batch has, a pure function of a seed; a large side is planned by windows.

An epoch of a large side: blocks of neighbouring rows in a drawn order, then rows shuffled within windows of those.

Nothing here is as large as the side but the counts of its blocks, a quarter of a byte a row. The number of a window's
batches follows from these counts, so any batch of the epoch is found by drawing one window.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.batches import buckets_of, edges_to, in_order, sizes_of, widths_of
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
    and then the batches. Of more rows than `WINDOW`, blocks are shuffled, and then the rows of each window.

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
    if max(len(side), _drawn_rows(side, weights)) > WINDOW:
        blocks = RowBlocks(side, max_length)
        layout = EpochLayout(blocks, batch_tokens=batch_tokens, seed=seed, epoch=epoch, weights=weights, pieces=pieces)
        return EpochPlan(
            layout.batches, layout.heaviest, lambda window: [EpochPart(*part) for part in layout.draw(window)]
        )
    parts = _whole(side, batch_tokens, max_length, np.random.default_rng((seed, epoch)), weights, pieces)
    return EpochPlan([sum(len(part.sizes) for part in parts)], [0], lambda _: parts)


def _drawn_rows(side: Side, weights: Sequence[float] | None) -> float:
    """About how many rows an epoch of a side has that is no larger than a window."""
    if not weights or len(side) > WINDOW:
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


WINDOW = 1_500_000
"""Rows, about, that are shuffled among one another: those of thousands of updates."""

BLOCK = 1 << 10
"""Neighbouring rows that come into a window together."""

_TOGETHER = 1 << 18
"""Rows that are looked at together."""

Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class RowBlocks:
    """Stretches of neighbouring rows of one corpus; how many rows of each, none over `max_length`, have which width."""

    def __init__(self, side: Side, max_length: int) -> None:
        self.side, self.max_length = side, max_length
        self.firsts = self._begin()
        self.ends = np.append(self.firsts[1:], len(side))
        self.corpora = np.zeros(len(self.firsts), np.int16) if side.corpora is None else side.corpora[self.firsts]
        lengths = (side.source.lengths, side.target.lengths)
        longest = min(max(int(each.max(initial=0)) for each in lengths) + 1, max_length)
        self.edges = edges_to(longest)
        self._buckets = np.append(buckets_of(self.edges), len(self.edges)).astype(np.uint16)  # the last is too long
        self.counts = np.empty((len(self.firsts), len(self.edges)), dtype=np.uint16)
        """(blocks, widths) rows."""
        for first in range(0, len(self.firsts), _TOGETHER // BLOCK):
            those = np.arange(first, min(first + _TOGETHER // BLOCK, len(self.firsts)))
            self.counts[those] = self._counted(those)

    def _begin(self) -> np.ndarray:
        """(blocks,) the first row of each."""
        rows, corpora = len(self.side), self.side.corpora
        firsts = [np.arange(0, rows, BLOCK)]
        if corpora is not None:
            for first in range(1, rows, _TOGETHER):
                here = corpora[first - 1 : min(first + _TOGETHER, rows)]
                firsts.append(np.flatnonzero(here[1:] != here[:-1]) + first)
        return np.unique(np.concatenate(firsts))

    def _counted(self, blocks: np.ndarray) -> np.ndarray:
        """(blocks, widths) rows of blocks that stand together."""
        rows, widths = slice(self.firsts[blocks[0]], self.ends[blocks[-1]]), len(self.edges) + 1
        block = np.repeat(np.arange(len(blocks)), self.ends[blocks] - self.firsts[blocks])
        counts = np.bincount(block * widths + self.bucket(rows), minlength=len(blocks) * widths)
        return counts.reshape(-1, widths)[:, :-1]

    def bucket(self, rows: slice | np.ndarray) -> np.ndarray:
        """(rows,) the bucket of each row's width, one more than the last if it is too long."""
        wider = np.maximum(self.side.source.lengths[rows], self.side.target.lengths[rows])
        return self._buckets[np.minimum(wider, len(self._buckets) - 1)]

    def rows(self, block: int) -> np.ndarray:
        """(rows,) int64: the rows of a block that are not too long, in their order."""
        first, end = self.firsts[block], self.ends[block]
        return first + np.flatnonzero(self.bucket(slice(first, end)) < len(self.edges))


@dataclass(frozen=True)
class _Drawn:
    """RowBlocks of an epoch, in order. (blocks,) each."""

    blocks: np.ndarray
    copies: np.ndarray
    """How often each came before in the epoch."""
    taken: np.ndarray
    """How many of its rows are in the epoch: of one block per corpus, not all."""

    def __getitem__(self, places: np.ndarray | slice) -> "_Drawn":
        return _Drawn(self.blocks[places], self.copies[places], self.taken[places])


class EpochLayout:
    """Which blocks each window of an epoch has, and how many batches."""

    def __init__(
        self,
        blocks: RowBlocks,
        *,
        batch_tokens: int,
        seed: int,
        epoch: int,
        weights: Sequence[float] | None,
        pieces: int | None,
    ) -> None:
        """`weights` and `pieces` are those of `plan_epoch`."""
        self._blocks, self._key, self._pieces, self._batch_tokens = blocks, (seed, epoch), pieces, batch_tokens
        self._rows = blocks.counts.sum(1, dtype=np.int64)
        # further numbers tell these draws from those of a whole epoch, of documents, and of pieces
        random = np.random.default_rng((*self._key, 3))
        drawn = self._drawn(weights or [1.0] * (int(blocks.corpora.max(initial=0)) + 1), random)
        drawn = drawn[random.permutation(len(drawn.blocks))]
        after = np.cumsum(drawn.taken)
        total = int(after[-1]) if len(after) else 0
        count = -(-total // WINDOW)
        cuts = np.searchsorted(after, [total * window // count for window in range(1, count)])
        windows = [drawn[slice(*ends)] for ends in zip([0, *cuts], [*cuts, len(after)], strict=True)]
        self._windows = [window for window in windows if window.taken.any()]
        self.batches: list[int] = []
        """Batches of each window."""
        tokens, widths = list[int](), list[int]()
        for window in self._windows:
            parts, most, widest = self._sizes(window)
            self.batches.append(sum(map(len, parts)))
            tokens.append(most)
            widths.append(widest)
        self.heaviest = sorted({each.index(max(each)) for each in (tokens, widths) if each})
        """The windows with the batch of most tokens, and with that of the widest rows."""

    def draw(self, window: int) -> list[Part]:
        """The parts of a window: rows, copies, sizes and order, as in `EpochPart`."""
        drawn = self._windows[window]
        rows = np.empty(int(drawn.taken.sum()), dtype=np.int32 if len(self._blocks.side) < 1 << 31 else np.int64)
        end = 0
        for block, taken in zip(drawn.blocks.tolist(), drawn.taken.tolist(), strict=True):
            rows[end : end + taken] = self._taken(block, taken)
            end += taken
        random = np.random.default_rng((*self._key, 4, window))
        if drawn.copies.any():
            order = random.permutation(len(rows))
            rows, copies = rows[order], np.repeat(drawn.copies, drawn.taken)[order]
        else:
            random.shuffle(rows)
            copies = np.broadcast_to(np.int8(0), len(rows))
        sizes, _, _ = self._sizes(drawn)
        split = (np.array_split(each, len(sizes)) for each in (rows, copies))
        return [(*part, random.permutation(len(part[-1]))) for part in zip(*split, sizes, strict=True)]

    def _drawn(self, weights: Sequence[float], random: np.random.Generator) -> _Drawn:
        """The blocks of the epoch: those of a corpus of weight 2.5 twice, and half its rows a third time."""
        blocks, copies, rows = [], [], []
        for corpus, weight in enumerate(weights):
            own, whole = np.flatnonzero(self._blocks.corpora == corpus), int(weight)
            for copy in range(whole):
                blocks.append(own)
                copies.append(np.full(len(own), copy))
                rows.append(self._rows[own])
            wanted = round((weight - whole) * int(self._rows[own].sum()))
            if wanted:
                own = random.permutation(own)
                after = np.cumsum(self._rows[own])
                own = own[: int(np.searchsorted(after, wanted)) + 1]
                blocks.append(own)
                copies.append(np.full(len(own), whole))
                rows.append(np.minimum(self._rows[own], wanted - (after[: len(own)] - self._rows[own])))
        if not blocks:
            return _Drawn(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        return _Drawn(*map(np.concatenate, (blocks, copies, rows)))

    def _taken(self, block: int, taken: int) -> np.ndarray:
        rows = self._blocks.rows(block)
        if taken == len(rows):
            return rows
        return np.random.default_rng((*self._key, 5, block)).permutation(rows)[:taken]

    def _sizes(self, drawn: _Drawn) -> tuple[list[np.ndarray], int, int]:
        """Rows of each batch of each part of a window; most tokens of a batch, and its greatest width."""
        blocks = self._blocks
        counts = blocks.counts[drawn.blocks].sum(0, dtype=np.int64)
        for at in np.flatnonzero(drawn.taken != self._rows[drawn.blocks]).tolist():
            block = int(drawn.blocks[at])
            some = blocks.bucket(self._taken(block, int(drawn.taken[at])))
            counts += np.bincount(some, minlength=len(counts)) - blocks.counts[block]
        widths = widths_of(blocks.edges, counts)
        total = int(widths.sum(dtype=np.int64))
        count = 1 if self._pieces is None else min(max(1, round(total / self._pieces)), len(widths))
        # the rows of a part are drawn: they have about the widths of every n-th row of the window
        sizes = [sizes_of(widths[part::count], self._batch_tokens) for part in range(count)]
        ends = np.cumsum(sizes[0]) * count - 1
        tokens = sizes[0] * widths[np.minimum(ends, len(widths) - 1)]
        return sizes, int(tokens.max()), int(widths[-1])
