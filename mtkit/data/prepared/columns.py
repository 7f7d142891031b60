"""Columns of prepared data, memory-mapped: token sequences and texts."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from mtkit.data.prepared.record import AGAIN
from mtkit.data.segments import Ragged
from mtkit.data.tokenizer import PAD
from mtkit.errors import DataError


class Mapped:
    """A column of numbers that stand in a mapped file, in a stretch for each record batch; nothing is copied ahead."""

    def __init__(
        self, values: np.ndarray, places: Sequence[int], rows: Sequence[int], added: Sequence[int] | None = None
    ) -> None:
        """`values` is the file; `places` say where in it the first of each batch's `rows` stands.

        `added`: what is to be added to the numbers of each batch, which are int64 then.
        """
        self._values = values
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._shift = np.array(places, dtype=np.int64) - (self._ends - rows)
        self._added = None if added is None else np.array(added, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """The numbers of these rows, counted from 0. Raises: IndexError for a row that there is not."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.asarray(rows)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"there are {len(self):,} rows, and none has the number {rows.max()}")
        batch = np.searchsorted(self._ends, rows, side="right")
        found = self._values[rows + self._shift[batch]]
        return found if self._added is None else found + self._added[batch]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def tolist(self) -> list[int]:
        """All of them."""
        numbers: list[int] = self[:].tolist()
        return numbers


Column = np.ndarray | Mapped
"""(rows,) numbers; both give those of a slice or of an array of rows."""


class Tokens:
    """A column of token sequences, memory-mapped: a flat int32 array, and where each row starts and how long it is."""

    def __init__(self, flat: np.ndarray, starts: Column, lengths: np.ndarray, vocabulary: int | None = None) -> None:
        """`vocabulary` is how many pieces there are, where it is to be seen to that there are no others."""
        self._flat = flat
        self._vocabulary = vocabulary
        self._starts = starts
        self.lengths = lengths
        """(rows,) uint16, or int32 where one is longer: pieces of each row, without beginning and end."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        """(length,) int32, the pieces of one row."""
        start = self._starts[np.array(row % len(self))]
        return self._flat[start : start + self.lengths[row]]

    @property
    def adjoining(self) -> np.ndarray:
        """(rows - 1,) bool: whether one piece, a break, lies between a row and the next."""
        starts = self._starts[:]
        return starts[:-1] + self.lengths[:-1] + 1 == starts[1:]

    def spans(self, firsts: np.ndarray, lasts: np.ndarray) -> "Tokens":
        """A row from each of `firsts` to that of `lasts`, with all that lies between; the rows there are adjoining."""
        starts = self._starts[firsts]
        lengths = (self._starts[lasts] + self.lengths[lasts] - starts).astype(np.int32)
        return Tokens(self._flat, starts, lengths, self._vocabulary)

    def taken(self, rows: np.ndarray) -> Ragged:
        """These rows, one behind the other. Raises: DataError for a piece that there is not."""
        lengths = self.lengths[rows].astype(np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self._starts[rows] - (ends - lengths), lengths)
        flat = self._flat[places]
        self._check(flat)
        return Ragged(flat, lengths)

    def padded(self, rows: np.ndarray, width: int, first: int | None, last: int | None) -> np.ndarray:
        """(len(rows), width) int64: the rows with `first` before and `last` behind, where given, then PAD.

        `width` must hold the longest row and what is added to it. Raises: DataError for a piece that there is not.
        """
        lengths = self.lengths[rows].astype(np.int64)
        before = int(first is not None)
        # every position reads some element, position 0 of the row at least, and padding is laid over afterwards
        column = np.arange(-before, width - before)
        real = (column >= 0) & (column < lengths[:, None])
        index = np.where(real, self._starts[rows][:, None] + column, 0)
        result = np.where(real, self._flat[index], PAD).astype(np.int64, copy=False)
        self._check(result)
        if first is not None:
            result[:, 0] = first
        if last is not None:
            result[np.arange(len(rows)), lengths + before] = last
        return result

    def _check(self, pieces: np.ndarray) -> None:
        if self._vocabulary is not None and pieces.size and not 0 <= pieces.min() <= pieces.max() < self._vocabulary:
            wrong = int(pieces.min() if pieces.min() < 0 else pieces.max())
            raise DataError(f"the prepared data is damaged (of {self._vocabulary:,} pieces, piece {wrong}); {AGAIN}")


class Texts(Sequence[str]):
    """A column of raw text, memory-mapped; a segment is decoded when it is asked for."""

    def __init__(self, chunks: pa.ChunkedArray) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            texts: list[str] = self._chunks[row].to_pylist()
            return texts
        text: str = self._chunks[row].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks.chunks:
            yield from chunk.to_pylist()
