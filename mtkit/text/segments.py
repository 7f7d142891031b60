"""Segment pairs as pieces, in a few arrays, with tags before them and breaks after them.

Pseudorandom numbers as functions of keys: SplitMix64 (Steele et al., OOPSLA 2014).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class Ragged(NamedTuple):
    """Sequences of pieces: concatenated, with the length of each."""

    flat: np.ndarray
    """(sum of lengths,) int32."""
    lengths: np.ndarray
    """(rows,) int32."""

    @property
    def starts(self) -> np.ndarray:
        """(rows,) int64: the place of each row's first piece in `flat`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return (rows,) the sum of `values`, one per piece, over each row; uint64 sums are modulo 2^64."""
        before = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values, dtype=values.dtype)])
        return before[self.starts + self.lengths] - before[self.starts]

    def only(self, keep: np.ndarray) -> "Ragged":
        """Return the rows for which `keep`, (rows,) bool, is True."""
        return Ragged(self.flat[np.repeat(keep, self.lengths)], self.lengths[keep])

    def prepend(self, marks: np.ndarray) -> "Ragged":
        """Return each row with its mark of `marks`, (rows,), before it."""
        return self._insert(self.starts, marks)

    def append(self, mark: int) -> "Ragged":
        """Return each row with the same mark after it."""
        return self._insert(np.cumsum(self.lengths), mark)

    def _insert(self, places: np.ndarray, marks: np.ndarray | int) -> "Ragged":
        flat = np.insert(self.flat, places, marks)
        return Ragged(flat.astype(np.int32, copy=False), self.lengths + np.int32(1))


@dataclass(frozen=True)
class Segments:
    """Segment pairs as pieces, with the origin of each."""

    source: Ragged
    target: Ragged
    lines: np.ndarray
    """(n,) int64: line of the input."""
    documents: np.ndarray
    """(n,) int64: number of the document; its segments are neighbours."""
    corpora: np.ndarray
    """(n,) int16."""
    tasks: np.ndarray
    """(n,) int16: direction."""

    def __len__(self) -> int:
        return len(self.lines)

    def only(self, keep: np.ndarray) -> "Segments":
        """Return the segments for which `keep`, (n,) bool, is True."""
        arrays = (self.lines, self.documents, self.corpora, self.tasks)
        return Segments(self.source.only(keep), self.target.only(keep), *(array[keep] for array in arrays))

    def with_tags(self, tags: np.ndarray) -> "Segments":
        """Return them with the tag of its direction before each source; `tags`: the piece of each direction."""
        return replace(self, source=self.source.prepend(tags[self.tasks]))

    def append(self, mark: int) -> "Segments":
        """Return them with a mark after each, on both sides."""
        return replace(self, source=self.source.append(mark), target=self.target.append(mark))


def lists(rows: Ragged) -> pa.ListArray:
    """Return the rows as an Arrow column of int32 lists."""
    offsets = np.zeros(len(rows.lengths) + 1, dtype=np.int32)
    np.cumsum(rows.lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.flat))


def mix(values: np.ndarray) -> np.ndarray:
    """Map each uint64 to another that looks random, one to one."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(keys: np.ndarray, number: int | np.ndarray) -> np.ndarray:
    """Return the `number`-th draw of each uint64 key, a float64 from 0 to below 1."""
    return (mix(keys + np.asarray(number, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53
