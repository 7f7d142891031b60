"""Both sides of a corpus as columns: of .tsv and .jsonl files (either gzipped), of Parquet files and of data sets.

Data sets of the `datasets` library come from the Hugging Face hub, or from a folder that it saved.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from mtkit.errors import DataError, shown
from mtkit.text.text_files import Lines, Repairs, open_file

Cell = str | int | float
"""A value of a row: text, or a number that may be a document id or a score."""

Rows = Iterator[tuple[int, list[Cell]]]
"""The number of each row, from 1 (of a text file, of its line), and its values."""

_PARQUET_ROWS, _DATASET_ROWS = 10_000, 1_000
"""Rows read together from a Parquet file, and from a data set."""

_DEFAULT_SPLIT = "train"
"""The split of a saved data set that stores no name of a split; the default of a corpus."""

_TEXT = {"string", "large_string", "string_view"}


def tsv_rows(path: Path, columns: Sequence[str], repairs: Repairs, *, gaps: bool) -> Rows:
    """Yield `columns` of each row in a file of tab-separated values.

    There is no quoting: every tab separates two fields. If columns are given by name, the first line holds the names;
    if by number, from 1, the first line is the first row. With `gaps`, a blank line is a row of empty texts.

    Raises: DataError naming the file and the line with another number of fields than the first, or the unknown column.
    """
    by_number = [column.isdecimal() for column in columns]
    if any(by_number) and not all(by_number):
        raise DataError(
            f"{path}: give the columns ({', '.join(columns)}) all by name or all by number, not mixed"
            f"{_file_hint(columns)}"
        )
    width, places = 0, [int(column) - 1 for column in columns if column.isdecimal()]
    for number, line in enumerate(Lines(path, repairs), start=1):
        if gaps and not line.strip():
            yield number, [""] * len(columns)
            continue
        fields = line.split("\t")
        if width == 0:
            width = len(fields)
            if not all(by_number):
                places = [_column_place(path, column, fields) for column in columns]
                continue
            if not all(0 <= place < width for place in places):
                raise DataError(f"{path} has columns 1 to {width}, so not all of {', '.join(columns)}")
        if len(fields) != width:
            raise DataError(
                f"{path}, line {number}: {len(fields)} field{'s' * (len(fields) > 1)}, but the first line has {width}; "
                "tabs separate fields, and quotes protect neither a tab nor a line end"
            )
        yield number, [fields[place] for place in places]


def jsonl_rows(path: Path, columns: Sequence[str], repairs: Repairs, *, gaps: bool) -> Rows:
    """Yield `columns` of each row in a file with one JSON object a line.

    A column is a key, or keys joined by dots for nested objects, as `translation.en`. With `gaps`, a blank line is a
    row of empty texts.

    Raises: DataError naming the file and the line that is no JSON object, lacks a column, or has a value of another
    type.
    """
    for number, line in enumerate(Lines(path, repairs), start=1):
        if gaps and not line.strip():
            yield number, [""] * len(columns)
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = "the line is empty" if not line.strip() else str(error)
            raise DataError(f"{where}: not JSON ({what}); each line must hold one object") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: {_json_type(row)}, not a JSON object with the columns as keys")
        # only an escape can write half of a surrogate pair, which is no character
        check = "\\u" in line
        yield number, [flatten(_json_value(row, column, where), repairs, where, check=check) for column in columns]


def flatten(value: Cell, repairs: Repairs, where: str, *, check: bool = False) -> Cell:
    """Return a field as one line of text: drop line ends at its end, replace each one inside by a space.

    Raises: DataError if `check` finds half of a surrogate pair.
    """
    if not isinstance(value, str):
        return value
    if check:
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


def _file_hint(columns: Sequence[str]) -> str:
    """Return an explanation if one of the columns is the name of a file, as for the scores of two text files."""
    files = [column for column in columns if os.path.isfile(column)]
    return f"; {files[0]} is a file: documents and scores of this corpus are columns too" if files else ""


def _column_place(path: Path, column: str, header: Sequence[str]) -> int:
    if header.count(column) != 1:
        how = "no column" if column not in header else "several columns"
        raise DataError(
            f"{path} has {how} {shown(column)} in its first line ({', '.join(header)[:200]}); "
            f"give one of these names, or numbers from 1 for a file without names{_file_hint([column])}"
        )
    return header.index(column)


def _json_value(row: dict[str, Any], column: str, where: str) -> Cell:
    value: Any = row
    for key in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or key not in value:
            there = ", ".join(row)[:200] or "none"
            raise DataError(f"{where}: no key {shown(column)}; there is {there}{_file_hint([column])}")
        value = value[key]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise DataError(f"{where}: {shown(column)} holds {_json_type(value)}, not text")
    return value


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "a string"}
    return names.get(type(value), "a number")


def parquet_rows(path: Path, columns: Sequence[str], repairs: Repairs) -> Rows:
    """Yield `columns` of each row in a Parquet file, read batch by batch.

    Raises: DataError if it is no valid Parquet file, lacks a column, or a column holds something else than text.
    """
    import pyarrow.parquet as pq

    with open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
            for column in columns:
                _check_column(table.schema_arrow, column, str(path))
            yield from arrow_rows(table.iter_batches(_PARQUET_ROWS, columns=list(columns)), columns, repairs, str(path))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a valid Parquet file ({_one_line(error)}); fetch it again") from error


def arrow_rows(
    batches: Iterable[pa.RecordBatch | pa.Table], columns: Sequence[str], repairs: Repairs, name: str
) -> Rows:
    """Yield `columns` of each row in Arrow batches, which messages call `name`.

    A column is given by its name, or by names joined by dots if columns are nested, as `translation.en`.

    Raises: DataError naming the column that is missing or no text, or the row without a value.
    """
    rows = 0
    for batch in batches:
        values = [_column_values(batch, column, name, rows) for column in columns]
        for number, row in enumerate(zip(*values, strict=True), start=rows + 1):
            yield number, [flatten(cell, repairs, name) for cell in row]
        rows += batch.num_rows


def _column_values(batch: pa.RecordBatch | pa.Table, column: str, name: str, before: int) -> list[Cell]:
    import pyarrow.compute as pc  # takes longer to import than pyarrow itself

    _check_column(batch.schema, column, name)
    first, *nested = _column_path(batch.schema, column)
    values = batch.column(first)
    for field in nested:
        values = pc.struct_field(values, field)
    if values.null_count:
        row = before + 1 + pc.index(pc.is_null(values), True).as_py()
        raise DataError(f"{name}, row {row}: column {column} holds nothing (null), not text")
    try:
        return values.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, rows {before + 1} on: column {column} is not UTF-8") from error


def _check_column(schema: pa.Schema, column: str, name: str) -> None:
    """Raises: DataError if a column is missing, or holds neither text nor numbers (for ids and scores)."""
    kind: Any = None
    fields: Any = schema
    for part in _column_path(schema, column):
        names = [field.name for field in fields]
        if names.count(part) != 1:
            how = "several columns" if part in names else "no column"
            there = ", ".join(_leaves(schema))[:200]
            raise DataError(f"{name} has {how} {column}; there is {there}{_file_hint([column])}")
        kind = fields.field(part).type
        fields = kind if pa.types.is_struct(kind) else ()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in _TEXT and not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
        raise DataError(f"{name}: column {column} holds {kind}, not text; there is {', '.join(_leaves(schema))[:200]}")


def _column_path(schema: pa.Schema, column: str) -> list[str]:
    return [column] if column in schema.names else column.split(".")


def _leaves(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[str]:
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def dataset_rows(
    name: str, subset: str | None, split: str, columns: Sequence[str], repairs: Repairs, *, streaming: bool
) -> Rows:
    """Yield `columns` of each row in a data set's split.

    Raises: DataError if the data set, subset, split or column does not exist, cannot be fetched, or is no text.
    """
    label = " ".join(part for part in (name, subset, split) if part)
    if Path(name).is_dir():
        rows = _load_saved(Path(name), split, subset)
    else:
        rows = _load_from_hub(name, subset, split, streaming)
    yield from arrow_rows(_dataset_batches(rows, label), columns, repairs, label)


def _dataset_batches(rows: Any, label: str) -> Iterator[Any]:
    batches = iter(rows.with_format("arrow").iter(batch_size=_DATASET_ROWS))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the library, its file formats and the network can raise
            raise DataError(f"data set {label}: reading failed ({_one_line(error)}); run the command again") from error
        yield batch


def _load_saved(folder: Path, split: str, subset: str | None) -> Any:
    """Load a split of a folder that `save_to_disk` wrote: a set of splits, or a single one under its own name.

    If the folder names another subset than the recipe, it is refused. Thus a recipe with a subset also runs offline.
    """
    import datasets

    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{folder} is a folder that datasets.save_to_disk did not write; "
            f"give such a folder, or the name of a data set on the hub"
        )
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: cannot read the saved data set ({_one_line(error)}); save it again") from error
    splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or _DEFAULT_SPLIT): saved}
    if split not in splits:
        raise DataError(f"{folder} has no split {shown(split)}; give one of: {', '.join(map(str, splits))}")
    known = splits[split].info.config_name
    if subset is not None and known not in (None, "default", subset):
        raise DataError(f"{folder} was saved from the subset {shown(known)}, and not from {shown(subset)}; correct one")
    return splits[split]


def _load_from_hub(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    try:
        with _quiet_hub():
            return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # a missing name, subset, split or network each raise something else
        which = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
        raise DataError(
            f"{which}: cannot load it ({_one_line(error)}); "
            f"check the names and the network, or give a folder that datasets.save_to_disk wrote"
        ) from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Suppress the dozen warnings of the hub's client about a missing network, before it fails."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
