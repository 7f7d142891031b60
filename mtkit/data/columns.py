"""Columns of prepared data, memory-mapped: numbers, token sequences and texts."""

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from mtkit.errors import DataError
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import PAD, PREPARE_AGAIN


class MappedFile:
    """A memory-mapped file that is checked before it is read.

    If another process shortens the file, reading after its end kills this process by SIGBUS, which Python cannot catch.
    A file that is removed or replaced under its name does not change for processes that have it open.
    """

    def __init__(self, path: Path) -> None:
        """Raises: OSError if it cannot be read; ValueError if it is empty."""
        self._path, self._handle = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self._state = self._stat()
        self.content = pa.py_buffer(mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ))

    def check(self) -> None:
        """Raises: DataError if the file was written to since it was opened."""
        if self._stat() != self._state:
            raise DataError(f"{self._path} was changed while it was in use; {PREPARE_AGAIN}")

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns


class Mapped:
    """A column of numbers in a mapped file, one stretch per record batch; nothing is copied until it is indexed."""

    def __init__(
        self,
        values: np.ndarray,
        places: Sequence[int],
        rows: Sequence[int],
        added: Sequence[int] | None = None,
        file: MappedFile | None = None,
    ) -> None:
        """`values` is the content of `file`; `places` has the index of the first number of each batch's `rows`.

        `added` is added to the numbers of each batch, which are then int64.
        """
        self._values, self._file = values, file
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._shift = np.array(places, dtype=np.int64) - (self._ends - rows)
        self._added = None if added is None else np.array(added, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the numbers of these rows, counted from 0.

        Raises: IndexError if a row does not exist; DataError if the file was changed.
        """
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.asarray(rows)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"there are {len(self):,} rows, and none has the number {rows.max()}")
        batch = np.searchsorted(self._ends, rows, side="right")
        if self._file is not None:
            self._file.check()
        numbers = self._values[rows + self._shift[batch]]
        return numbers if self._added is None else numbers + self._added[batch]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def tolist(self) -> list[int]:
        """Return all numbers."""
        numbers: list[int] = self[:].tolist()
        return numbers


Column = np.ndarray | Mapped
"""(rows,) numbers, indexed by a slice or an array of rows."""


class Tokens:
    """A column of token sequences, memory-mapped: a flat int32 array, with the start and length of each row."""

    def __init__(
        self,
        flat: np.ndarray,
        starts: Column,
        lengths: np.ndarray,
        vocabulary: int | None = None,
        file: MappedFile | None = None,
    ) -> None:
        """`vocabulary`: the number of pieces, if tokens are to be checked against it.

        `flat` is the content of `file`; every method that reads it raises DataError after the file was changed.
        """
        self._pieces, self._file = flat, file
        self._vocabulary = vocabulary
        self._starts = starts
        self.lengths = lengths
        """(rows,) uint16, or int32 if one is longer: pieces of each row, without beginning and end."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def _flat(self) -> np.ndarray:
        if self._file is not None:
            self._file.check()
        return self._pieces

    def __getitem__(self, row: int) -> np.ndarray:
        """(length,) int32, the pieces of one row."""
        start = self._starts[np.array(row % len(self))]
        return self._flat[start : start + self.lengths[row]]

    @property
    def adjoining(self) -> np.ndarray:
        """(rows - 1,) bool: whether exactly one piece, a break, separates a row from the next."""
        starts = self._starts[:]
        return starts[:-1] + self.lengths[:-1] + 1 == starts[1:]

    def spans(self, firsts: np.ndarray, lasts: np.ndarray) -> "Tokens":
        """Return rows that each span the rows from one of `firsts` to one of `lasts`, which are adjoining."""
        starts = self._starts[firsts]
        lengths = (self._starts[lasts] + self.lengths[lasts] - starts).astype(np.int32)
        return Tokens(self._pieces, starts, lengths, self._vocabulary, self._file)

    def take(self, rows: np.ndarray) -> Ragged:
        """Return a copy of these rows. Raises: DataError for a piece outside the vocabulary."""
        lengths = self.lengths[rows].astype(np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self._starts[rows] - (ends - lengths), lengths)
        flat = self._flat[places]
        self._check(flat)
        return Ragged(flat, lengths)

    def pad(self, rows: np.ndarray, width: int, first: int | None, last: int | None) -> np.ndarray:
        """Return (len(rows), width) int64: each row with `first` before it and `last` after it, unless None, then PAD.

        `width` must suffice for the longest row with these. Raises: DataError for a piece outside the vocabulary.
        """
        lengths = self.lengths[rows].astype(np.int64)
        offset = int(first is not None)
        # every position reads some element, that at index 0 if it is padding
        column = np.arange(-offset, width - offset)
        real = (column >= 0) & (column < lengths[:, None])
        index = np.where(real, self._starts[rows][:, None] + column, 0)
        result = np.where(real, self._flat[index], PAD).astype(np.int64, copy=False)
        self._check(result)
        if first is not None:
            result[:, 0] = first
        if last is not None:
            result[np.arange(len(rows)), lengths + offset] = last
        return result

    def _check(self, pieces: np.ndarray) -> None:
        if self._vocabulary is not None and pieces.size and not 0 <= pieces.min() <= pieces.max() < self._vocabulary:
            wrong = int(pieces.min() if pieces.min() < 0 else pieces.max())
            raise DataError(
                f"the prepared data is damaged (of {self._vocabulary:,} pieces, piece {wrong}); {PREPARE_AGAIN}"
            )


class Texts(Sequence[str]):
    """A column of raw text, memory-mapped; a segment is decoded when it is indexed."""

    def __init__(self, chunks: pa.ChunkedArray, file: MappedFile) -> None:
        self._chunks, self._file = chunks, file

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        self._file.check()
        if isinstance(row, slice):
            texts: list[str] = self._chunks[row].to_pylist()
            return texts
        text: str = self._chunks[row].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks.chunks:
            self._file.check()
            yield from chunk.to_pylist()
