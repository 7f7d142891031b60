"""Prepared data, read memory-mapped: token columns as one flat array with starts and lengths, never row by row.

The folder, written by `mtkit.data.prepare`:

    prepared.json     format version, settings, input fingerprints, counts
    tokenizer/        joint.model, or source.model and target.model
    train.arrow       columns source and target (lists of int32) and line (int64), as an Arrow stream
    valid.arrow       the same, and source_text and target_text as they were read; so NAME.arrow for each test side

Further columns where they are needed: task (int16, the direction; then the source begins with the tag of its target
language), in train.arrow corpus (int16), document (int64). Where train.arrow has documents, a break piece stands behind
each row, on both sides, so that neighbouring rows can be read as one (`mtkit.data.documents`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from mtkit.data.segments import Ragged
from mtkit.data.tokenizer import PAD, Tokenizers
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings

FORMAT = 3
"""Raised when the layout of the folder changes so that older ones cannot be read."""


class Tokens:
    """A column of token sequences, memory-mapped: a flat int32 array, and where each row starts and how long it is."""

    def __init__(self, flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._flat = flat
        self._starts = starts
        self.lengths = lengths
        """(rows,) int32: pieces of each row, without beginning and end."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        """(length,) int32, the pieces of one row."""
        start = self._starts[row]
        return self._flat[start : start + self.lengths[row]]

    @property
    def adjoining(self) -> np.ndarray:
        """(rows - 1,) bool: whether one piece, a break, lies between a row and the next."""
        return self._starts[:-1] + self.lengths[:-1] + 1 == self._starts[1:]

    def spans(self, firsts: np.ndarray, lasts: np.ndarray) -> "Tokens":
        """A row from each of `firsts` to that of `lasts`, with all that lies between; the rows there are adjoining."""
        lengths = self._starts[lasts] + self.lengths[lasts] - self._starts[firsts]
        return Tokens(self._flat, self._starts[firsts], lengths.astype(np.int32))

    def taken(self, rows: np.ndarray) -> Ragged:
        """These rows, one behind the other."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self._starts[rows] - (ends - lengths), lengths)
        return Ragged(self._flat[places], lengths)

    def padded(self, rows: np.ndarray, width: int, first: int | None, last: int | None) -> np.ndarray:
        """(len(rows), width) int64: the rows with `first` before and `last` behind, where given, then PAD.

        `width` must hold the longest row and what is added to it.
        """
        lengths = self.lengths[rows].astype(np.int64)
        before = int(first is not None)
        # every position reads some element, position 0 of the row at least, and padding is laid over afterwards
        column = np.arange(-before, width - before)
        real = (column >= 0) & (column < lengths[:, None])
        index = np.where(real, self._starts[rows][:, None] + column, 0)
        result = np.where(real, self._flat[index], PAD).astype(np.int64, copy=False)
        if first is not None:
            result[:, 0] = first
        if last is not None:
            result[np.arange(len(rows)), lengths + before] = last
        return result


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


@dataclass(frozen=True)
class Side:
    """One side of the data: train, valid or a test side, its rows in the order of the input."""

    source: Tokens
    target: Tokens
    lines: np.ndarray
    """(rows,) int64: the line of the input files that each row comes from, counted from 1."""
    source_text: Texts | None
    """As it was read, BLEU's reference among it; None for the training side."""
    target_text: Texts | None
    tasks: np.ndarray | None = None
    """(rows,) int16: the direction of each row, its place in `Prepared.directions`; None where there is only one."""
    corpora: np.ndarray | None = None
    """(rows,) int16: the training corpus of each row, its place in `DataSettings.train`; None where there is one."""
    documents: np.ndarray | None = None
    """(rows,) int64: the document of each row, counted from 0, in validation and test sides that have documents, and in
    the training side where its segments are to be joined."""

    def __len__(self) -> int:
        return len(self.lines)

    def drawn(self, rows: np.ndarray, source: Tokens, target: Tokens) -> "Side":
        """These rows with other tokens: source and target have them in the order of `rows`."""

        def taken(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        columns = (taken(self.tasks), taken(self.corpora), taken(self.documents))
        return Side(source, target, self.lines[rows], None, None, *columns)

    def too_long(self, max_length: int) -> int:
        """How many rows have more than `max_length` tokens on a side, end mark counted; training leaves them out."""
        return int((np.maximum(self.source.lengths, self.target.lengths) >= max_length).sum())


@dataclass
class Prepared:
    """A prepared folder, opened: nothing of its text and tokens is in memory until it is used."""

    folder: Path
    settings: DataSettings
    record: dict[str, Any]
    """What prepared.json holds."""
    train: Side
    valid: Side
    tests: dict[str, Side]
    """The test sides by name, in the order of the recipe."""

    @property
    def test(self) -> Side | None:
        """The first test side."""
        return next(iter(self.tests.values()), None)

    @property
    def directions(self) -> list[str]:
        """What `Side.tasks` count in, as `en-de`; a single one in most data."""
        return self.settings.directions

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """Loaded at first use. Raises: DataError."""
        return Tokenizers.load(self.folder / "tokenizer")

    @property
    def fingerprint(self) -> str:
        """Changes when settings, inputs or vocabulary do; stays when the folder is moved."""
        return str(self.record["fingerprint"])


def read_record(folder: Path) -> dict[str, Any]:
    """What prepared.json of a prepared folder holds. Raises: DataError where it is missing, damaged or too old."""
    path = folder / "prepared.json"
    if not path.is_file():
        raise DataError(
            f"no prepared data in {folder}; run `mtkit prepare` first, with the same --recipe, or with --data {folder} "
            "and your text (without any text it prepares the built-in corpus)"
        )
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; repeat the `mtkit prepare` that made it, with --overwrite") from error
    if version != FORMAT:
        raise DataError(
            f"{folder} has format {version}, this mtkit reads format {FORMAT}; "
            "repeat the `mtkit prepare` that made it, with --overwrite"
        )
    return record


def open_prepared(folder: Path) -> Prepared:
    """Open what `mtkit prepare` wrote. Raises: DataError where it is missing, damaged or of another version."""
    record = read_record(folder)
    try:
        settings = DataSettings.model_validate({**record["settings"], "folder": folder})
        sides = {name: _open_side(folder / f"{name}.arrow", side["rows"]) for name, side in record["sides"].items()}
        train, valid = sides.pop("train"), sides.pop("valid")
        return Prepared(folder, settings, record, train, valid, tests=sides)
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"the prepared data in {folder} is damaged ({_first_line(error)}); "
            "repeat the `mtkit prepare` that made it, with --overwrite"
        ) from error


def _open_side(path: Path, rows: int) -> Side:
    with pa.memory_map(str(path)) as mapped:
        whole = mapped.read_buffer()
    flat = np.frombuffer(whole, dtype=np.int32, count=whole.size // 4)
    batches = list(pa.ipc.open_stream(pa.BufferReader(whole)))
    if sum(batch.num_rows for batch in batches) != rows:
        raise ValueError(f"{path.name} does not hold {rows:,} rows")
    names = batches[0].schema.names
    has_text = "source_text" in names
    breaks = int("document" in names and not has_text)

    def column(name: str) -> np.ndarray | None:
        return np.concatenate([batch[name].to_numpy() for batch in batches]) if name in names else None

    return Side(
        source=_tokens(flat, whole.address, [batch["source"] for batch in batches], breaks),
        target=_tokens(flat, whole.address, [batch["target"] for batch in batches], breaks),
        lines=np.concatenate([batch["line"].to_numpy() for batch in batches]),
        source_text=Texts(pa.chunked_array([batch["source_text"] for batch in batches])) if has_text else None,
        target_text=Texts(pa.chunked_array([batch["target_text"] for batch in batches])) if has_text else None,
        tasks=column("task"),
        corpora=column("corpus"),
        documents=column("document"),
    )


def _tokens(flat: np.ndarray, address: int, chunks: list[pa.ListArray], breaks: int) -> Tokens:
    """Rows of all record batches, by where their values lie in the mapped file; the last `breaks` are not theirs."""
    starts, lengths = [], []
    for chunk in chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.buffers()[1]
        # Arrow aligns buffers to 8 bytes, so the distance is a whole number of int32; no values, no buffer
        base = 0 if values is None else (values.address - address) // 4 + chunk.values.offset
        starts.append(offsets[:-1].astype(np.int64) + base)
        lengths.append(np.diff(offsets) - np.int32(breaks))
    return Tokens(flat, np.concatenate(starts), np.concatenate(lengths).astype(np.int32, copy=False))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
