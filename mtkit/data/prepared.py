"""The folder of prepared data, opened memory-mapped: token columns are flat arrays with starts and lengths.

`mtkit.data.prepare` writes:

    prepared.json     format version, settings, input fingerprints, counts
    tokenizer/        joint.model, or source.model and target.model
    train.arrow       columns source and target (lists of int32) and line (int64), as an Arrow stream
    valid.arrow       the same, and source_text and target_text as they were read; likewise NAME.arrow per test side

Optional columns: task (int16, the direction; the source then begins with the tag of its target language), document
(int64), and in train.arrow corpus (int16). If train.arrow has documents, each row is followed by a break piece, on both
sides, so that neighbouring rows can be read as one (`mtkit.data.resampling`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import ValidationError
from typing_extensions import TypedDict

from mtkit.data.columns import Column, Mapped, MappedFile, Texts, Tokens
from mtkit.data.record import Record, fingerprint_of, read_record
from mtkit.errors import DataError, first_line
from mtkit.recipe import Recipe
from mtkit.recipe.data import DataSettings
from mtkit.storage.records import explain
from mtkit.text.tokenizer import PREPARE_AGAIN, Tokenizers

_CHECKED_ROWS = 1 << 20
"""Rows of a column that are checked together."""


@dataclass(frozen=True)
class Side:
    """One side of the data: train, valid or a test side, its rows in the order of the input."""

    source: Tokens
    target: Tokens
    lines: Column
    """(rows,) int64: the line of the input files that each row comes from, counted from 1."""
    source_text: Texts | None
    """Raw text, for scores; None for the training side."""
    target_text: Texts | None
    tasks: Column | None = None
    """(rows,) int16: the direction of each row, an index into `Prepared.directions`; None if there is only one."""
    corpora: Column | None = None
    """(rows,) int16: the training corpus of each row, an index into `DataSettings.train`; None if there is only one."""
    documents: np.ndarray | None = None
    """(rows,) int64: the document of each row, counted from 0: in validation and test sides with documents, and in a
    training side whose segments are to be joined."""
    directions: Sequence[str] = ()
    """`Prepared.directions`."""

    def __len__(self) -> int:
        return len(self.lines)

    def with_tokens(self, rows: np.ndarray, source: Tokens, target: Tokens) -> "Side":
        """Return these rows with other tokens, without text; `source` and `target` have one row for each of `rows`."""
        columns = (self.tasks, self.corpora, self.documents)
        tasks, corpora, documents = (None if column is None else column[rows] for column in columns)
        return Side(source, target, self.lines[rows], None, None, tasks, corpora, documents, self.directions)

    def too_long(self, max_length: int) -> int:
        """Count the rows with more than `max_length` tokens on a side, end mark counted, which training leaves out."""
        return int((np.maximum(self.source.lengths, self.target.lengths) >= max_length).sum())


class ModelSizes(TypedDict):
    """Pieces of the vocabularies, and the number of directions."""

    source_vocabulary: int
    target_vocabulary: int
    tasks: int


@dataclass
class Prepared:
    """An opened prepared folder; its text and tokens are read when they are used."""

    folder: Path
    settings: DataSettings
    record: Record
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
        """Translation directions, e.g. `en-de`; `Side.tasks` are indices into this list."""
        return self.settings.directions

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers, loaded at first use. Raises: DataError if they are damaged or from other data."""
        self.check_tokenizers()
        return Tokenizers.load(self.folder / "tokenizer")

    def check_tokenizers(self) -> None:
        """Raises: DataError if the files of the tokenizers are damaged or from other data."""
        if fingerprint_of(self.record["identity"], self.folder / "tokenizer") != self.fingerprint:
            raise DataError(f"the tokenizer in {self.folder} is not the one that encoded its pieces; {PREPARE_AGAIN}")

    @property
    def model_sizes(self) -> ModelSizes:
        """The arguments of `mtkit.model.build.build_model` that follow from the data."""
        source, target = self.tokenizers.source.size, self.tokenizers.target.size
        return {"source_vocabulary": source, "target_vocabulary": target, "tasks": len(self.directions)}

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this data's settings instead of its own, and the data's default of `model.tie`."""
        return recipe.model_copy(update={"data": self.settings}).tied(joint=self.tokenizers.joint)

    @property
    def fingerprint(self) -> str:
        """A hash of settings, inputs and vocabulary; it does not change when the folder is moved."""
        return self.record["fingerprint"]


def open_prepared(folder: Path) -> Prepared:
    """Open what `mtkit prepare` wrote. Raises: DataError if it is missing, damaged or of another version."""
    record = read_record(folder)
    try:
        settings = DataSettings.model_validate({**record["settings"], "folder": folder})
        sides = {name: _open_side(folder, name, record, settings.directions) for name in record["sides"]}
        _check_sides(sides, settings, record)
    except ValidationError as error:
        raise DataError(
            f"{folder / 'prepared.json'} is damaged (settings: {explain(error)}); {PREPARE_AGAIN}"
        ) from error
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise DataError(f"the prepared data in {folder} is damaged ({first_line(error)}); {PREPARE_AGAIN}") from error
    record["settings"] = settings.model_dump(mode="json", exclude={"folder"})
    train, valid = sides.pop("train"), sides.pop("valid")
    return Prepared(folder, settings, record, train, valid, tests=sides)


_COLUMNS = {
    **dict.fromkeys(("source", "target"), pa.list_(pa.int32())),
    **dict.fromkeys(("line", "document"), pa.int64()),
    **dict.fromkeys(("task", "corpus"), pa.int16()),
    **dict.fromkeys(("source_text", "target_text"), pa.string()),
}


def _check_sides(sides: Mapping[str, Side], settings: DataSettings, record: Record) -> None:
    """Raises: ValueError if the sides or their counts do not match the settings."""
    corpora = {"train": settings.train, "valid": settings.valid, **settings.test} if settings.train else {}
    builtin: Iterable[str] = ("train", "valid", "test")
    if settings.task is not None:
        from mtkit.data.builtin.registry import side_lengths  # imports all tasks

        builtin = side_lengths(settings.task)
    if set(sides) != set(corpora or builtin):
        raise ValueError(f"it has the sides {', '.join(sides)}")
    for name, side in sides.items():
        if len(record["sides"][name]["corpora"]) != len(corpora.get(name, "1")):
            raise ValueError(f"prepared.json counts other corpora of {name} than it has")
        for column, count in ((side.tasks, len(settings.directions)), (side.corpora, len(settings.train))):
            if column is not None and not _all_below(column, count):
                raise ValueError(f"{name}.arrow has a direction or corpus that the settings do not have")


def _all_below(column: Column, count: int) -> bool:
    """Return whether all numbers are in range(count). Stretches are read, since a mapped column takes memory."""
    parts = (column[begin : begin + _CHECKED_ROWS] for begin in range(0, len(column), _CHECKED_ROWS))
    return all(0 <= part.min() <= part.max() < count for part in parts)


def _open_side(folder: Path, name: str, record: Record, directions: Sequence[str]) -> Side:
    path, rows = folder / f"{name}.arrow", record["sides"][name]["rows"]
    file = MappedFile(path)
    flat = np.frombuffer(file.content, dtype=np.int32, count=file.content.size // 4)
    batches = list(pa.ipc.open_stream(pa.BufferReader(file.content)))
    if not batches or sum(batch.num_rows for batch in batches) != rows:
        raise ValueError(f"{path.name} does not hold {rows:,} rows")
    schema, has_text = batches[0].schema, name != "train"
    needed = {"source", "target", "line"} | ({"source_text", "target_text"} if has_text else set())
    if not needed <= set(schema.names) or any(_COLUMNS.get(field.name) != field.type for field in schema):
        raise ValueError(f"{path.name} has other columns than mtkit writes")
    for batch in batches:
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise ValueError(f"{path.name} has empty cells")
    breaks = int("document" in schema.names and not has_text)

    def tokens(side: Literal["source", "target"]) -> Tokens:
        starts, lengths = _token_rows([batch[side] for batch in batches], file, flat, breaks)
        return Tokens(flat, starts, lengths, record["vocabulary"][side], file)

    def numbers(name: str) -> Mapped | None:
        return _map_numbers([batch[name] for batch in batches], file) if name in schema.names else None

    def texts(name: str) -> Texts | None:
        return Texts(pa.chunked_array([batch[name] for batch in batches]), file) if has_text else None

    documents = numbers("document")
    return Side(
        source=tokens("source"),
        target=tokens("target"),
        lines=_map_numbers([batch["line"] for batch in batches], file),
        source_text=texts("source_text"),
        target_text=texts("target_text"),
        tasks=numbers("task"),
        corpora=numbers("corpus"),
        documents=None if documents is None else documents[:],
        directions=directions,
    )


def _token_rows(
    chunks: list[pa.ListArray], file: MappedFile, flat: np.ndarray, breaks: int
) -> tuple[Mapped, np.ndarray]:
    """Return the starts in the mapped file and the lengths of all rows, without the last `breaks` pieces of each."""
    rows = [len(chunk) for chunk in chunks]
    lengths = np.empty(sum(rows), dtype=np.uint16)
    places, added, end = [], [], 0
    for chunk, count in zip(chunks, rows, strict=True):
        values = chunk.values.buffers()[1]
        # Arrow aligns buffers to 8 bytes, so distances are multiples of int32; a buffer of no values may be anywhere
        added.append(_distance(values, file) // 4 + chunk.values.offset if len(chunk.values) else 0)
        places.append(_distance(chunk.buffers()[1], file) // 4 + chunk.offset if count else 0)
        offsets = np.from_dlpack(chunk.offsets)  # `to_numpy` would import pandas, which takes 45 MB and 0.3 s
        batch_lengths = np.diff(offsets) - np.int32(breaks)
        if batch_lengths.min(initial=0) < 0:
            raise ValueError("a row has no break after it")
        if batch_lengths.max(initial=0) >= np.iinfo(lengths.dtype).max:  # one more, for an end mark, must fit
            lengths = lengths.astype(np.int32)
        lengths[end : end + count] = batch_lengths
        end += count
    return Mapped(flat, places, rows, added, file), lengths


def _map_numbers(chunks: list[pa.Array], file: MappedFile) -> Mapped:
    """Return a column of numbers that is read from the mapped file."""
    dtype = np.dtype(chunks[0].type.to_pandas_dtype())
    values = np.frombuffer(file.content, dtype=dtype, count=file.content.size // dtype.itemsize)
    # a column of no rows may have no buffer
    places = [len(part) and _distance(part.buffers()[1], file) // dtype.itemsize + part.offset for part in chunks]
    return Mapped(values, places, [len(chunk) for chunk in chunks], file=file)


def _distance(buffer: pa.Buffer, file: MappedFile) -> int:
    """Return the offset of a buffer in the file, in bytes."""
    distance = int(buffer.address - file.content.address)
    if not 0 <= distance <= file.content.size:
        raise ValueError("its pieces are compressed")
    return distance
