"""Joining the segments of a document into rows, and marks (tags, breaks) between pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Sequences of pieces: all of them one behind the other, and how long each is."""

    flat: np.ndarray
    """(sum of lengths,) int32."""
    lengths: np.ndarray
    """(rows,) int32."""

    def only(self, keep: np.ndarray) -> "Ragged":
        """The rows that `keep`, (rows,) bool, is True for."""
        return Ragged(self.flat[np.repeat(keep, self.lengths)], self.lengths[keep])

    def behind(self, other: "Ragged") -> "Ragged":
        """The rows of `other`, then these."""
        return Ragged(np.concatenate([other.flat, self.flat]), np.concatenate([other.lengths, self.lengths]))

    def marked(self, marks: np.ndarray) -> "Ragged":
        """Each row with its mark in front; a mark below 0 is none."""
        real = marks >= 0
        starts = np.cumsum(self.lengths) - self.lengths
        flat = np.insert(self.flat, starts[real], marks[real])
        return Ragged(flat.astype(np.int32, copy=False), (self.lengths + real).astype(np.int32))

    def grouped(self, firsts: np.ndarray) -> "Ragged":
        """Rows run together: one from each index in `firsts`, the first of which is 0, up to the next."""
        lengths = np.add.reduceat(self.lengths, firsts) if len(firsts) else self.lengths[:0]
        return Ragged(self.flat, lengths.astype(np.int32))


@dataclass(frozen=True)
class Segments:
    """Segment pairs as pieces, and for each where it comes from."""

    source: Ragged
    target: Ragged
    lines: np.ndarray
    """(n,) int64: line of the input."""
    documents: np.ndarray
    """(n,) int64: running number of the document; segments of one stand together."""
    corpora: np.ndarray
    """(n,) int16."""
    tasks: np.ndarray
    """(n,) int16: direction."""

    def __len__(self) -> int:
        return len(self.lines)

    def only(self, keep: np.ndarray) -> "Segments":
        """Those that `keep`, (n,) bool, is True for."""
        arrays = (self.lines, self.documents, self.corpora, self.tasks)
        return Segments(self.source.only(keep), self.target.only(keep), *(each[keep] for each in arrays))

    def behind(self, other: "Segments") -> "Segments":
        """The segments of `other`, then these."""
        return Segments(
            self.source.behind(other.source),
            self.target.behind(other.target),
            np.concatenate([other.lines, self.lines]),
            np.concatenate([other.documents, self.documents]),
            np.concatenate([other.corpora, self.corpora]),
            np.concatenate([other.tasks, self.tasks]),
        )

    def rows(self, firsts: np.ndarray, tags: np.ndarray | None, break_piece: int) -> "Segments":
        """Rows of these segments, one from each index in `firsts` up to the next: tag, segment, break, segment, ...

        A row has the line, document, corpus and task of its first segment. `tags`: the piece of each task.
        """
        begins = np.zeros(len(self), dtype=bool)
        begins[firsts] = True
        target = np.where(begins, -1, break_piece)
        source = target if tags is None else np.where(begins, tags[self.tasks], break_piece)
        arrays = (self.lines, self.documents, self.corpora, self.tasks)
        return Segments(
            self.source.marked(source).grouped(firsts),
            self.target.marked(target).grouped(firsts),
            *(each[firsts] for each in arrays),
        )


def joined(segments: Iterator[Segments], pieces: int) -> Iterator[tuple[Segments, np.ndarray]]:
    """The same segments, and where rows begin that join those of one document up to `pieces` a side.

    Breaks are counted; a segment that is longer by itself is a row of its own. What a document's end, or the budget,
    has not closed yet waits for the segments to come, so where these are cut into chunks does not matter.
    """
    waiting: Segments | None = None
    for chunk in segments:
        whole = chunk if waiting is None else chunk.behind(waiting)
        if not len(whole):
            continue
        firsts = _firsts(whole, pieces)
        closed = np.arange(len(whole)) < firsts[-1]
        if closed.any():
            yield whole.only(closed), firsts[:-1]
        waiting = whole.only(~closed)
    if waiting is not None:
        yield waiting, np.zeros(1, dtype=np.int64)


def _firsts(segments: Segments, pieces: int) -> np.ndarray:
    """Where rows begin: at a new document, and where a side would grow beyond the budget."""
    firsts = []
    current, source, target = None, 0, 0
    columns = (segments.documents.tolist(), segments.source.lengths.tolist(), segments.target.lengths.tolist())
    for index, (document, more_source, more_target) in enumerate(zip(*columns, strict=True)):
        source, target = source + 1 + more_source, target + 1 + more_target
        if document != current or source > pieces or target > pieces:
            firsts.append(index)
            current, source, target = document, more_source, more_target
    return np.array(firsts, dtype=np.int64)
