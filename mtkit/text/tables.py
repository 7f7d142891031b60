"""One text file with both sides: tab-separated values (.tsv) and JSON lines (.jsonl), either gzipped or not.

Columns of Arrow batches as rows of text: Parquet files, and what data sets are made of.

Data sets of the `datasets` library: from the Hugging Face hub, or a folder that it has saved.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mtkit.errors import DataError, shown
from mtkit.text.text_files import Lines, Repairs, open_file

Cell = str | int
"""A value of a row: text, or the number that may be the id of a document."""


def tsv_rows(path: Path, columns: Sequence[str], repairs: Repairs, *, gaps: bool) -> Iterator[tuple[int, list[Cell]]]:
    """The line number and the values of `columns` of each row of a file of tab-separated values.

    There is no quoting: every tab parts two fields, whatever stands around it. Columns are given by name, and then the
    first line holds the names; or by number from 1, and then the first line is the first row. With `gaps` a blank
    line is a row of empty texts.

    Raises: DataError naming the file and the line with another number of fields than the first, or the unknown column.
    """
    numbered = enumerate(Lines(path, repairs), start=1)
    by_number = [column.isdecimal() for column in columns]
    if any(by_number) and not all(by_number):
        raise DataError(f"{path}: give the columns ({', '.join(columns)}) all by name or all by number, not mixed")
    width, places = 0, [int(column) - 1 for column in columns if column.isdecimal()]
    for number, line in numbered:
        if gaps and not line.strip():
            yield number, [""] * len(columns)
            continue
        fields = line.split("\t")
        if width == 0:
            width = len(fields)
            if not all(by_number):
                places = [_place(path, column, fields) for column in columns]
                continue
            if not all(0 <= place < width for place in places):
                raise DataError(f"{path} has columns 1 to {width}, so not all of {', '.join(columns)}")
        if len(fields) != width:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields where the first line has {width}; "
                f"tabs separate fields, and quotes do not protect a tab"
            )
        yield number, [fields[place] for place in places]


def jsonl_rows(path: Path, columns: Sequence[str], repairs: Repairs, *, gaps: bool) -> Iterator[tuple[int, list[Cell]]]:
    """The line number and the values of `columns` of each row of a file with one JSON object a line.

    A column is a key, or keys joined by dots where objects are nested, as `translation.en`. With `gaps` a blank line
    is a row of empty texts.

    Raises: DataError naming the file and the line that is no JSON object, lacks a column, or holds no text there.
    """
    for number, line in enumerate(Lines(path, repairs), start=1):
        if gaps and not line.strip():
            yield number, [""] * len(columns)
            continue
        where = f"{path}, line {number}"
        row = _parsed(line, where)
        # only an escape can write half of a surrogate pair, which is no character
        suspect = "\\u" in line
        yield number, [flat(_value(row, column, where), repairs, where, suspect=suspect) for column in columns]


def flat(value: Cell, repairs: Repairs, where: str, *, suspect: bool = False) -> Cell:
    """A field as one line of text: line ends at its end are dropped, those inside become a space each."""
    if not isinstance(value, str):
        return value
    if suspect:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: half of a surrogate pair ({error.object[error.start]!a}) is not text") from error
    if "\n" in value:
        repairs.inner_newlines += 1
        value = value.replace("\r\n", "\n").rstrip("\n").replace("\n", " ")
    if value.endswith("\r"):
        repairs.carriage_returns += 1
        value = value.rstrip("\r")
    return value


def _place(path: Path, column: str, header: Sequence[str]) -> int:
    if header.count(column) != 1:
        how = "no column" if column not in header else "several columns"
        raise DataError(
            f"{path} has {how} {shown(column)} in its first line ({', '.join(header)[:200]}); "
            f"give a name that stands there, or numbers from 1 for a file without names"
        )
    return header.index(column)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = "the line is empty" if not line.strip() else str(error)
        raise DataError(f"{where}: not JSON ({what}); each line must hold one object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: {_kind(row)}, not a JSON object with the columns as keys")
    return row


def _value(row: dict[str, Any], column: str, where: str) -> Cell:
    """What stands under a key, or under keys joined by dots. A number may be the id of a document."""
    found: Any = row
    for key in [column] if column in row else column.split("."):
        if not isinstance(found, dict) or key not in found:
            raise DataError(f"{where}: no key {shown(column)}; there is {', '.join(row)[:200] or 'none'}")
        found = found[key]
    if not isinstance(found, str | int) or isinstance(found, bool):
        raise DataError(f"{where}: {shown(column)} holds {_kind(found)}, not text")
    return found


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "a string"}
    return names.get(type(value), "a number")


_ROWS_READ = 10_000
"""Rows read from a Parquet file at a time."""

_TEXT = {"string", "large_string", "string_view"}


def parquet_rows(path: Path, columns: Sequence[str], repairs: Repairs) -> Iterator[tuple[int, list[Cell]]]:
    """The number, from 1, and the values of `columns` of each row of a Parquet file, batch by batch.

    Raises: DataError where it is no sound Parquet file, lacks a column, or a column holds something else than text.
    """
    import pyarrow.parquet as pq

    with open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
            for column in columns:
                _check_kind(table.schema_arrow, column, str(path))
            yield from rows_of(table.iter_batches(_ROWS_READ, columns=list(columns)), columns, repairs, str(path))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a valid Parquet file ({reason(error)}); fetch it again") from error


def rows_of(
    batches: Iterable[pa.RecordBatch | pa.Table], columns: Sequence[str], repairs: Repairs, name: str
) -> Iterator[tuple[int, list[Cell]]]:
    """The number, from 1, and the values of `columns` of each row of Arrow batches out of a place called `name`.

    A column is named, or reached by names joined by dots where columns are nested, as `translation.en`.

    Raises: DataError naming the column that is not there or no text, or the row that holds nothing there.
    """
    before = 0
    for batch in batches:
        values = [_values(batch, column, name, before) for column in columns]
        for number, row in enumerate(zip(*values, strict=True), start=before + 1):
            yield number, [flat(cell, repairs, name) for cell in row]
        before += batch.num_rows


def _values(batch: pa.RecordBatch | pa.Table, column: str, name: str, before: int) -> list[Cell]:
    _check_kind(batch.schema, column, name)
    first, *inner = _path(batch.schema, column)
    found = batch.column(first)
    for field in inner:
        found = pc.struct_field(found, field)
    if found.null_count:
        row = before + 1 + pc.index(pc.is_null(found), True).as_py()
        raise DataError(f"{name}, row {row}: column {column} holds nothing (null), not text")
    try:
        return found.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, rows {before + 1} on: column {column} is not UTF-8") from error


def _check_kind(schema: pa.Schema, column: str, name: str) -> None:
    """Raises: DataError where a column is not there, or holds neither text nor whole numbers (for ids)."""
    kind: Any = None
    fields: Any = schema
    for part in _path(schema, column):
        names = [field.name for field in fields]
        if names.count(part) != 1:
            how = "several columns" if part in names else "no column"
            raise DataError(f"{name} has {how} {column}; there is {', '.join(_leaves(schema))[:200]}")
        kind = fields.field(part).type
        fields = kind if pa.types.is_struct(kind) else ()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in _TEXT and not pa.types.is_integer(kind):
        raise DataError(f"{name}: column {column} holds {kind}, not text; there is {', '.join(_leaves(schema))[:200]}")


def _path(schema: pa.Schema, column: str) -> list[str]:
    """A column's name, or the names down to a nested one."""
    return [column] if column in schema.names else column.split(".")


def _leaves(fields: Iterable[pa.Field], above: str = "") -> Iterator[str]:
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _leaves(field.type, f"{above}{field.name}.")
        else:
            yield above + field.name


def reason(error: Exception) -> str:
    """What another library says of an error, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


_ROWS = 1_000
"""Rows taken from a data set at a time."""


def dataset_rows(
    name: str, subset: str | None, split: str, columns: Sequence[str], repairs: Repairs, *, streaming: bool
) -> Iterator[tuple[int, list[Cell]]]:
    """The number, from 1, and the values of `columns` of each row of a data set's split.

    Raises: DataError where there is no such data set, subset, split or column, no network to fetch it, or no text.
    """
    called = " ".join(part for part in (name, subset, split) if part)
    rows = _saved(Path(name), split) if Path(name).is_dir() else _from_hub(name, subset, split, streaming)
    yield from rows_of(_batches(rows, called), columns, repairs, called)


def _batches(rows: Any, called: str) -> Iterator[Any]:
    batches = iter(rows.with_format("arrow").iter(batch_size=_ROWS))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the library, its file formats and the network can raise
            raise DataError(f"data set {called}: reading failed ({reason(error)}); run the command again") from error
        yield batch


def _saved(folder: Path, split: str) -> Any:
    """A split of what `save_to_disk` wrote: a set of splits, or a single one, which answers to its own name only."""
    import datasets

    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{folder} is a folder that datasets.save_to_disk did not write; "
            f"give such a folder, or the name of a data set on the hub"
        )
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: cannot read the saved data set ({reason(error)}); save it again") from error
    if not isinstance(saved, datasets.DatasetDict):
        own = str(saved.split or split)
        splits = {own: saved}
    else:
        splits = dict(saved)
    if split not in splits:
        raise DataError(f"{folder} has no split {shown(split)}; there is {', '.join(map(str, splits))}")
    return splits[split]


def _from_hub(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    try:
        with _quiet():
            return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # a missing name, subset, split or network are each raised as something else
        which = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
        raise DataError(
            f"{which}: cannot load it ({reason(error)}); "
            f"check the names and the network, or give a folder that datasets.save_to_disk wrote"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the dozen warnings by which the hub's client says that there is no network, before it fails."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
