"""The plan of an epoch: the rows of each batch, a pure function of a seed.

A large side is planned by windows: blocks of neighbouring rows are shuffled, then the rows within windows of blocks.
Memory grows with the side only by the counts of its blocks, a quarter of a byte per row. A window's number of batches
follows from these counts, so any batch of the epoch is found by drawing one window.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.batches import buckets_of, edges_to, sizes_of, sort_by_length, widths_of
from mtkit.data.prepared import Side

WINDOW = 1_500_000
"""Approximate number of rows that are shuffled together, enough for thousands of updates."""

BLOCK = 1 << 10
"""Neighbouring rows that are always in the same window."""

_COUNTED_ROWS = 1 << 18
"""Rows that are counted together."""


@dataclass(frozen=True)
class EpochPart:
    """Rows of an epoch that are sorted by length together and cut into batches."""

    rows: np.ndarray
    """(rows,) row numbers in the order in which they were drawn."""
    copies: np.ndarray
    """(rows,) how often each row came before in the epoch; 0 unless its corpus has a weight above 1."""
    sizes: np.ndarray
    """(batches,) rows of each batch, beginning with the shortest segments."""
    order: np.ndarray
    """(batches,) training order of the batches."""

    def batches(self, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
        """Return indices into `rows` of each batch, in training order, if the rows have these lengths (rows,).

        The lengths may differ from the planned ones: the numbers of rows per batch stay, but other rows are chosen.
        """
        return self._split(sort_by_length(source, target))

    def planned(self, side: Side) -> list[np.ndarray]:
        """Return the rows of each batch, in training order, by their lengths in `side`."""
        return self._split(self.rows[sort_by_length(side.source.lengths[self.rows], side.target.lengths[self.rows])])

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        cuts = np.cumsum([0, *self.sizes])
        return [rows[cuts[batch] : cuts[batch + 1]] for batch in self.order]


@dataclass(frozen=True)
class EpochPlan:
    """An epoch as a sequence of windows, each in parts; the rows of a window are drawn when they are needed."""

    sizes: Sequence[int]
    """Batches of each window."""
    heaviest: Sequence[int]
    """The windows of the batch with most tokens and of the batch with the widest rows."""
    draw: Callable[[int], Sequence[EpochPart]]
    """Draws the parts of a window."""

    @property
    def batches(self) -> int:
        """The number of batches, known without drawing."""
        return sum(self.sizes)

    def parts(self, begin: int = 0) -> Iterator[tuple[EpochPart, int]]:
        """Yield the parts from the one with batch `begin`, counted from 0, and how many batches of each to skip.

        Windows before `begin` are not drawn, so the cost does not grow with it.
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
    """Return the rows of an epoch's batches, in training order: a pure function of the arguments.

    A batch holds as many rows as keep rows times the wider side (end mark counted) within `batch_tokens`, rounded down
    to `ROW_DIGITS` binary digits, or a single longer row. Rows with more than `max_length` tokens on a side, end mark
    counted, are left out. Every epoch shuffles the rows before they are sorted by length buckets of both sides, and
    then shuffles the batches. With more than `WINDOW` rows, blocks are shuffled, and then the rows of each window.

    `weights` are one per corpus of `side.corpora`: an epoch has every row of a corpus of weight 2.5 twice, and
    half of them, another half each epoch, a third time.
    """
    epoch_plan = plan_epoch(
        side, batch_tokens=batch_tokens, max_length=max_length, seed=seed, epoch=epoch, weights=weights
    )
    return [rows for part, _ in epoch_plan.parts() for rows in part.planned(side)]


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
    """Plan an epoch in parts of about `pieces` pieces per side, or one part per window if None; else as `plan`."""
    if max(len(side), _epoch_rows(side, weights)) > WINDOW:
        windows = _Windows(side, max_length, batch_tokens, (seed, epoch), weights, pieces)
        return EpochPlan(windows.batches, windows.heaviest, windows.draw)
    parts = _one_window(side, batch_tokens, max_length, np.random.default_rng((seed, epoch)), weights, pieces)
    return EpochPlan([sum(len(part.sizes) for part in parts)], [0], lambda _: parts)


def _epoch_rows(side: Side, weights: Sequence[float] | None) -> float:
    """Return the approximate number of rows in an epoch, weights counted if the side is no larger than a window."""
    if not weights or len(side) > WINDOW:
        return len(side)
    if side.corpora is None:
        return weights[0] * len(side)
    return float(np.bincount(side.corpora[:], minlength=len(weights)) @ np.array(weights))


def _one_window(
    side: Side,
    batch_tokens: int,
    max_length: int,
    random: np.random.Generator,
    weights: Sequence[float] | None,
    pieces: int | None,
) -> list[EpochPart]:
    """Return the parts of an epoch that fits one window."""
    wider = np.maximum(side.source.lengths, side.target.lengths)
    rows = np.flatnonzero(wider < max_length).astype(np.int32)
    if weights is not None and side.corpora is not None:
        rows = _repeat_by_weight(rows, side.corpora[:], weights, random)
    elif weights and weights[0] != 1:
        rows = _repeat_by_weight(rows, np.zeros(len(side), dtype=np.int16), weights, random)
    if len(rows) == 0:
        return []
    random.shuffle(rows)
    copies = _count_copies(rows) if max(weights or [1]) > 1 else np.zeros(len(rows), dtype=np.int8)
    total = int(wider[rows].sum(dtype=np.int64)) + len(rows)
    count = 1 if pieces is None else min(max(1, round(total / pieces)), len(rows))
    parts = []
    for part_rows, part_copies in zip(np.array_split(rows, count), np.array_split(copies, count), strict=True):
        edges = edges_to(int(wider[part_rows].max()) + 1)
        counts = np.bincount(buckets_of(edges)[wider[part_rows]], minlength=len(edges))
        sizes = sizes_of(widths_of(edges, counts), batch_tokens)
        parts.append(EpochPart(part_rows, part_copies, sizes, random.permutation(len(sizes))))
    return parts


def _repeat_by_weight(
    rows: np.ndarray, corpora: np.ndarray, weights: Sequence[float], random: np.random.Generator
) -> np.ndarray:
    """Repeat the rows by their corpus's weight; the rows for its fraction are drawn."""
    chosen, corpus = [], corpora[rows]
    for number, weight in enumerate(weights):
        members = rows[corpus == number]
        times = int(weight)
        chosen += [np.tile(members, times), random.permutation(members)[: round((weight - times) * len(members))]]
    return np.concatenate(chosen)


def _count_copies(rows: np.ndarray) -> np.ndarray:
    """Return how often each row came before."""
    order = np.argsort(rows, kind="stable")
    same = np.diff(rows[order], prepend=-1) == 0
    places = np.arange(len(rows))
    copies = np.empty(len(rows), dtype=np.int64)
    copies[order] = places - np.maximum.accumulate(np.where(same, 0, places))
    return copies


class RowBlocks:
    """Blocks of neighbouring rows of one corpus, with the number of rows per width, up to `max_length`."""

    def __init__(self, side: Side, max_length: int) -> None:
        self.side = side
        self.firsts = self._find_firsts()
        self.ends = np.append(self.firsts[1:], len(side))
        self.corpora = np.zeros(len(self.firsts), np.int16) if side.corpora is None else side.corpora[self.firsts]
        lengths = (side.source.lengths, side.target.lengths)
        longest = min(max(int(numbers.max(initial=0)) for numbers in lengths) + 1, max_length)
        self.edges = edges_to(longest)
        self._buckets = np.append(buckets_of(self.edges), len(self.edges)).astype(np.uint16)  # the last is too long
        self.counts = np.empty((len(self.firsts), len(self.edges)), dtype=np.uint16)
        """(blocks, widths) rows."""
        for first in range(0, len(self.firsts), _COUNTED_ROWS // BLOCK):
            last = min(first + _COUNTED_ROWS // BLOCK, len(self.firsts))
            rows, widths = slice(self.firsts[first], self.ends[last - 1]), len(self.edges) + 1
            block = np.repeat(np.arange(last - first), self.ends[first:last] - self.firsts[first:last])
            counts = np.bincount(block * widths + self.bucket(rows), minlength=(last - first) * widths)
            self.counts[first:last] = counts.reshape(-1, widths)[:, :-1]

    def _find_firsts(self) -> np.ndarray:
        """Return (blocks,) the first row of each block."""
        rows, corpora = len(self.side), self.side.corpora
        firsts = [np.arange(0, rows, BLOCK)]
        if corpora is not None:
            for first in range(1, rows, _COUNTED_ROWS):
                numbers = corpora[first - 1 : min(first + _COUNTED_ROWS, rows)]
                firsts.append(np.flatnonzero(numbers[1:] != numbers[:-1]) + first)
        return np.unique(np.concatenate(firsts))

    def bucket(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return (rows,) the bucket of each row's width; rows that are too long have one more than the last."""
        wider = np.maximum(self.side.source.lengths[rows], self.side.target.lengths[rows])
        return self._buckets[np.minimum(wider, len(self._buckets) - 1)]

    def rows(self, block: int) -> np.ndarray:
        """Return (rows,) int64: the rows of a block that are not too long, in their order."""
        first, end = self.firsts[block], self.ends[block]
        return first + np.flatnonzero(self.bucket(slice(first, end)) < len(self.edges))


@dataclass(frozen=True)
class _DrawnBlocks:
    """Blocks of an epoch, in order. (blocks,) each."""

    blocks: np.ndarray
    copies: np.ndarray
    """Number of times that each block came before in the epoch."""
    taken: np.ndarray
    """Number of its rows in the epoch: all, except for one block per corpus."""

    def __getitem__(self, places: np.ndarray | slice) -> "_DrawnBlocks":
        return _DrawnBlocks(self.blocks[places], self.copies[places], self.taken[places])


class _Windows:
    """The windows of an epoch: their blocks and numbers of batches."""

    def __init__(
        self,
        side: Side,
        max_length: int,
        batch_tokens: int,
        key: tuple[int, int],
        weights: Sequence[float] | None,
        pieces: int | None,
    ) -> None:
        """`key`: seed and epoch; the others as in `plan_epoch`."""
        self._blocks = blocks = RowBlocks(side, max_length)
        self._key, self._pieces, self._batch_tokens = key, pieces, batch_tokens
        self._rows = blocks.counts.sum(1, dtype=np.int64)
        # the third number distinguishes these draws from those of a small epoch, of documents and of pieces
        random = np.random.default_rng((*self._key, 3))
        drawn = self._draw_blocks(weights or [1.0] * (int(blocks.corpora.max(initial=0)) + 1), random)
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
        self.heaviest = sorted({numbers.index(max(numbers)) for numbers in (tokens, widths) if numbers})

    def draw(self, window: int) -> list[EpochPart]:
        """Draw the parts of a window."""
        drawn = self._windows[window]
        rows = np.empty(int(drawn.taken.sum()), dtype=np.int32 if len(self._blocks.side) < 1 << 31 else np.int64)
        end = 0
        for block, taken in zip(drawn.blocks.tolist(), drawn.taken.tolist(), strict=True):
            rows[end : end + taken] = self._take(block, taken)
            end += taken
        random = np.random.default_rng((*self._key, 4, window))
        if drawn.copies.any():
            order = random.permutation(len(rows))
            rows, copies = rows[order], np.repeat(drawn.copies, drawn.taken)[order]
        else:
            random.shuffle(rows)
            copies = np.broadcast_to(np.int8(0), len(rows))
        sizes, _, _ = self._sizes(drawn)
        parts = zip(np.array_split(rows, len(sizes)), np.array_split(copies, len(sizes)), sizes, strict=True)
        return [EpochPart(rows, copies, batches, random.permutation(len(batches))) for rows, copies, batches in parts]

    def _draw_blocks(self, weights: Sequence[float], random: np.random.Generator) -> _DrawnBlocks:
        """Return the epoch's blocks: of a corpus of weight 2.5, all twice and half its rows a third time."""
        blocks, copies, rows = [], [], []
        for corpus, weight in enumerate(weights):
            members, times = np.flatnonzero(self._blocks.corpora == corpus), int(weight)
            for copy in range(times):
                blocks.append(members)
                copies.append(np.full(len(members), copy))
                rows.append(self._rows[members])
            wanted = round((weight - times) * int(self._rows[members].sum()))
            if wanted:
                members = random.permutation(members)
                after = np.cumsum(self._rows[members])
                members = members[: int(np.searchsorted(after, wanted)) + 1]
                blocks.append(members)
                copies.append(np.full(len(members), times))
                rows.append(np.minimum(self._rows[members], wanted - (after[: len(members)] - self._rows[members])))
        if not blocks:
            return _DrawnBlocks(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        return _DrawnBlocks(*map(np.concatenate, (blocks, copies, rows)))

    def _take(self, block: int, taken: int) -> np.ndarray:
        rows = self._blocks.rows(block)
        if taken == len(rows):
            return rows
        return np.random.default_rng((*self._key, 5, block)).permutation(rows)[:taken]

    def _sizes(self, drawn: _DrawnBlocks) -> tuple[list[np.ndarray], int, int]:
        """Return each part's batch sizes (batches,) in a window, a batch's maximum tokens, and the maximum width."""
        blocks = self._blocks
        counts = blocks.counts[drawn.blocks].sum(0, dtype=np.int64)
        for at in np.flatnonzero(drawn.taken != self._rows[drawn.blocks]).tolist():
            block = int(drawn.blocks[at])
            buckets = blocks.bucket(self._take(block, int(drawn.taken[at])))
            counts += np.bincount(buckets, minlength=len(counts)) - blocks.counts[block]
        widths = widths_of(blocks.edges, counts)
        total = int(widths.sum(dtype=np.int64))
        count = 1 if self._pieces is None else min(max(1, round(total / self._pieces)), len(widths))
        # the rows of a part are drawn: they have about the widths of every n-th row of the window
        sizes = [sizes_of(widths[part::count], self._batch_tokens) for part in range(count)]
        ends = np.cumsum(sizes[0]) * count - 1
        tokens = sizes[0] * widths[np.minimum(ends, len(widths) - 1)]
        return sizes, int(tokens.max()), int(widths[-1])
