"""Columns of Arrow batches as rows of text: Parquet files, and what data sets are made of."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mtkit.data.readers.tables import Cell, flat
from mtkit.data.readers.text import Repairs, open_file
from mtkit.errors import DataError

_ROWS = 10_000
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
            yield from rows_of(table.iter_batches(_ROWS, columns=list(columns)), columns, repairs, str(path))
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
