"""One text file with both sides: tab-separated values (.tsv) and JSON lines (.jsonl), either gzipped or not."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtkit.errors import DataError, shown
from mtkit.text.readers.text import Lines, Repairs

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
