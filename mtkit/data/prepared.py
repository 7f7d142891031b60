"""Prepared data, read memory-mapped: token columns as one flat array with starts and lengths, never row by row.

The folder, written by `mtkit.data.prepare`:

    prepared.json     format version, settings, input fingerprints, counts
    tokenizer/        joint.model, or source.model and target.model
    train.arrow       columns source and target (lists of int32) and line (int64), as an Arrow stream
    valid.arrow       the same, and source_text and target_text as they were read; so NAME.arrow for each test side

Further columns where they are needed: task (int16, the direction; then the source begins with the tag of its target
language), in train.arrow corpus (int16), document (int64). Where train.arrow has documents, a break piece stands behind
each row, on both sides, so that neighbouring rows can be read as one (`mtkit.data.resampling`).

prepared.json: what is known of prepared data, read back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import pyarrow as pa
from pydantic import StringConstraints, ValidationError
from typing_extensions import TypedDict

from mtkit.data.columns import AGAIN, Column, Mapped, MappedFile, Texts, Tokens
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, explain, read_stored, stored
from mtkit.text.tokenizer import Tokenizers

FORMAT = 3
"""Raised when the layout of the folder changes so that older ones cannot be read."""


class Sides(TypedDict):
    """A count of the source side and of the target side."""

    source: Count
    target: Count


@stored
class Altered(TypedDict):
    """A target that does not come back from its pieces."""

    line: int
    text: str
    back: str


@stored
class Counts(TypedDict):
    """What was counted in a side or a corpus; see `mtkit.data.sides`."""

    segments: Count
    words: Sides
    pieces: Sides
    unknown: Sides
    bytes: Sides
    found: dict[str, Count]
    left_out: dict[str, Count]
    altered: NotRequired[Count]
    sentences: NotRequired[dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,3}$")], Count]]


class CorpusCounts(Counts):
    """Counts of one corpus."""

    direction: str
    suspicious_line: int | None
    altered_line: NotRequired[Altered | None]


@stored
class PieceUse(TypedDict):
    """Occurrences in training of the pieces of a vocabulary, without special pieces and byte pieces."""

    used: Count
    """Pieces that occur at all."""
    rare: Count
    """Pieces that occur, but fewer than `mtkit.data.sides.RARE` times."""
    enough: Count
    """Size of a vocabulary without the rare ones of several characters."""


class SideCounts(Counts):
    """Counts of one side, with those of its corpora."""

    rows: Count
    corpora: list[CorpusCounts]
    use: NotRequired[dict[str, PieceUse]]
    """Of the training side: by the name of a vocabulary, joint, or source and target."""


@stored
class Input(TypedDict):
    """What was read, and what was put right in it; see `mtkit.text.corpora`."""

    sha256: str
    carriage_returns: NotRequired[int]
    byte_order_marks: NotRequired[int]
    inner_newlines: NotRequired[int]
    line_separators: NotRequired[int]
    inner_carriage_returns: NotRequired[int]
    oddities: NotRequired[dict[str, dict[str, list[Count]]]]


class Identity(TypedDict):
    """What decides whether data must be prepared anew."""

    settings: dict[str, Any]
    inputs: dict[str, str]


@stored
class Record(TypedDict):
    """Content of prepared.json."""

    format: int
    mtkit: str
    fingerprint: str
    settings: dict[str, Any]
    identity: Identity
    inputs: dict[str, Input]
    normalization: NotRequired[dict[str, str]]
    """Of source and target; earlier versions normalised both by `settings`."""
    vocabulary: Sides
    sides: dict[str, SideCounts]
    seconds: float


def read_record(folder: Path) -> Record:
    """The record of a prepared folder. Raises: DataError where it is missing, damaged or of another version."""
    path = folder / "prepared.json"
    if not path.exists():
        raise DataError(
            f"no prepared data in {folder}; run `mtkit prepare` first, with the same --recipe, or with --data {folder} "
            "and your text (without text it prepares the built-in corpus)"
        )
    check_regular(folder)
    return read_stored(path, Record, AGAIN, error=DataError, version=FORMAT)


_STRETCH = 1 << 20
"""Rows of a column that are looked at together."""


@dataclass(frozen=True)
class Side:
    """One side of the data: train, valid or a test side, its rows in the order of the input."""

    source: Tokens
    target: Tokens
    lines: Column
    """(rows,) int64: the line of the input files that each row comes from, counted from 1."""
    source_text: Texts | None
    """Raw text, which scores use; None for the training side."""
    target_text: Texts | None
    tasks: Column | None = None
    """(rows,) int16: the direction of each row, its place in `Prepared.directions`; None where there is only one."""
    corpora: Column | None = None
    """(rows,) int16: the training corpus of each row, its place in `DataSettings.train`; None where there is one."""
    documents: np.ndarray | None = None
    """(rows,) int64: the document of each row, counted from 0, in validation and test sides that have documents, and in
    the training side where its segments are to be joined."""

    def __len__(self) -> int:
        return len(self.lines)

    def drawn(self, rows: np.ndarray, source: Tokens, target: Tokens) -> "Side":
        """These rows with other tokens: source and target have them in the order of `rows`."""

        def taken(column: Column | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        return Side(
            source,
            target,
            self.lines[rows],
            None,
            None,
            tasks=taken(self.tasks),
            corpora=taken(self.corpora),
            documents=taken(self.documents),
        )

    def too_long(self, max_length: int) -> int:
        """How many rows have more than `max_length` tokens on a side, end mark counted; training leaves them out."""
        return int((np.maximum(self.source.lengths, self.target.lengths) >= max_length).sum())


@dataclass
class Prepared:
    """A prepared folder, opened: nothing of its text and tokens is in memory until it is used."""

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
        """Loaded at first use. Raises: DataError for damaged ones, and for those of other data."""
        found = Tokenizers.load(self.folder / "tokenizer")
        if {"source": found.source.size, "target": found.target.size} != self.record["vocabulary"]:
            raise DataError(f"the tokenizer in {self.folder} is not the one that encoded its pieces; {AGAIN}")
        return found

    @property
    def fingerprint(self) -> str:
        """Changes when settings, inputs or vocabulary do; stays when the folder is moved."""
        return self.record["fingerprint"]


def open_prepared(folder: Path) -> Prepared:
    """Open what `mtkit prepare` wrote. Raises: DataError where it is missing, damaged or of another version."""
    record = read_record(folder)
    try:
        settings = DataSettings.model_validate({**record["settings"], "folder": folder})
        sides = {name: _open_side(folder, name, record) for name in record["sides"]}
        _check_sides(sides, settings, record)
    except ValidationError as error:
        raise DataError(f"{folder / 'prepared.json'} is damaged (settings: {explain(error)}); {AGAIN}") from error
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise DataError(f"the prepared data in {folder} is damaged ({_first_line(error)}); {AGAIN}") from error
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
    """Raises: ValueError where the sides, or what is known of them, are not those that the settings name."""
    corpora = {"train": settings.train, "valid": settings.valid, **settings.test} if settings.train else {}
    if set(sides) != set(corpora or ("train", "valid", "test")):
        raise ValueError(f"it has the sides {', '.join(sides)}")
    for name, side in sides.items():
        if len(record["sides"][name]["corpora"]) != len(corpora.get(name, "1")):
            raise ValueError(f"prepared.json counts other corpora of {name} than it has")
        for column, count in ((side.tasks, len(settings.directions)), (side.corpora, len(settings.train))):
            if column is not None and not _all_below(column, count):
                raise ValueError(f"{name}.arrow has a direction or corpus that the settings do not have")


def _all_below(column: Column, count: int) -> bool:
    """Whether all numbers are from 0 to below `count`. To read one that is mapped takes memory: it is in stretches."""
    parts = (column[begin : begin + _STRETCH] for begin in range(0, len(column), _STRETCH))
    return all(0 <= part.min() <= part.max() < count for part in parts)


def _open_side(folder: Path, name: str, record: Record) -> Side:
    path, rows = folder / f"{name}.arrow", record["sides"][name]["rows"]
    file = MappedFile(path)
    whole = file.content
    flat = np.frombuffer(whole, dtype=np.int32, count=whole.size // 4)
    batches = list(pa.ipc.open_stream(pa.BufferReader(whole)))
    if not batches or sum(batch.num_rows for batch in batches) != rows:
        raise ValueError(f"{path.name} does not hold {rows:,} rows")
    schema = batches[0].schema
    needed = {"source", "target", "line"} | (set() if name == "train" else {"source_text", "target_text"})
    if not needed <= set(schema.names) or any(_COLUMNS.get(each.name) != each.type for each in schema):
        raise ValueError(f"{path.name} has other columns than mtkit writes")
    for batch in batches:
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise ValueError(f"{path.name} has empty cells")
    has_text = name != "train"
    breaks = int("document" in schema.names and not has_text)

    def column(name: str) -> np.ndarray | None:
        return np.concatenate([batch[name].to_numpy() for batch in batches]) if name in schema.names else None

    def tokens(side: Literal["source", "target"]) -> Tokens:
        starts, lengths = _places([batch[side] for batch in batches], file, flat, breaks)
        return Tokens(flat, starts, lengths, record["vocabulary"][side], file)

    def numbers(name: str) -> Mapped | None:
        return _mapped([batch[name] for batch in batches], file) if name in schema.names else None

    return Side(
        source=tokens("source"),
        target=tokens("target"),
        lines=_mapped([batch["line"] for batch in batches], file),
        source_text=Texts(pa.chunked_array([batch["source_text"] for batch in batches]), file) if has_text else None,
        target_text=Texts(pa.chunked_array([batch["target_text"] for batch in batches]), file) if has_text else None,
        tasks=numbers("task"),
        corpora=numbers("corpus"),
        documents=column("document"),
    )


def _places(chunks: list[pa.ListArray], file: MappedFile, flat: np.ndarray, breaks: int) -> tuple[Mapped, np.ndarray]:
    """Starts, in the mapped file, and lengths of all record batches' rows; the last `breaks` pieces are not theirs."""
    rows = [len(chunk) for chunk in chunks]
    lengths = np.empty(sum(rows), dtype=np.uint16)
    places, added, end, whole = [], [], 0, file.content
    for chunk, count in zip(chunks, rows, strict=True):
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.buffers()[1]
        # Arrow aligns buffers to 8 bytes, so distances are whole numbers of int32; that of no values lies anywhere
        added.append(_distance(values, whole) // 4 + chunk.values.offset if len(chunk.values) else 0)
        places.append(_distance(chunk.buffers()[1], whole) // 4 + chunk.offset if count else 0)
        own = np.diff(offsets) - np.int32(breaks)
        if own.min(initial=0) < 0:
            raise ValueError("a row has no break behind it")
        if own.max(initial=0) >= np.iinfo(lengths.dtype).max:  # one more, for an end mark, must go in
            lengths = lengths.astype(np.int32)
        lengths[end : end + count] = own
        end += count
    return Mapped(flat, places, rows, added, file), lengths


def _mapped(chunks: list[pa.Array], file: MappedFile) -> Mapped:
    """A column of numbers, as it stands in the mapped file."""
    whole = file.content
    dtype = np.dtype(chunks[0].type.to_pandas_dtype())
    values = np.frombuffer(whole, dtype=dtype, count=whole.size // dtype.itemsize)
    # a column of no rows may have no buffer
    places = [len(each) and _distance(each.buffers()[1], whole) // dtype.itemsize + each.offset for each in chunks]
    return Mapped(values, places, [len(each) for each in chunks], file=file)


def _distance(buffer: pa.Buffer, whole: pa.Buffer) -> int:
    """Bytes from the beginning of the file to that of one of its buffers."""
    distance = int(buffer.address - whole.address)
    if not 0 <= distance <= whole.size:
        raise ValueError("its pieces are compressed")
    return distance


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
