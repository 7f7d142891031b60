"""An epoch of a large side: blocks of neighbouring rows in a drawn order, then rows shuffled within windows of those.

Nothing here is as large as the side but the counts of its blocks, a quarter of a byte a row. The number of a window's
batches follows from these counts, so any batch of the epoch is found by drawing one window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.batches.batch import buckets_of, edges_to, sizes_of, widths_of
from mtkit.data.prepared import Side

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
