"""What mtkit reads back from disk: each file by the type of what it holds, and the first fault of one in one line.

Values of numpy as Python's own, without numpy.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

from mtkit.errors import MtkitError, cut, shown

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A count: an integer from 0."""

LARGEST, LARGEST_LINES = 64 << 20, 1 << 30
"""Maximum bytes of a record, and of a file of records that are lines: a larger file is damaged or foreign."""

stored = with_config(ConfigDict(extra="allow"))
"""Decorates a TypedDict: keys that it does not name stay, as people and later versions write them."""


def read_stored(
    path: Path,
    kind: type[T],
    advice: str,
    *,
    error: type[MtkitError] = MtkitError,
    version: int | None = None,
) -> T:
    """The content of a JSON file, as `kind`, a TypedDict or a dataclass, says; types are not bent.

    `version` is what its key `format` must be. `advice` ends the message of an error.

    Raises: `error` where the file cannot be read, is no JSON, or holds something else: file, key and value, what to do.
    """
    text = _read(path, advice, error)
    if version is not None:
        _check_version(path, text, version, advice, error)
    try:
        found = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as fault:
        raise error(f"{path} is damaged ({explain(fault)}); {advice}") from fault
    return found


def read_stored_lines(path: Path, kind: type[T], advice: str, *, error: type[MtkitError] = MtkitError) -> Iterator[T]:
    """The lines of a JSON lines file, `kind` a TypedDict, as `read_stored`; a last one that a kill cut is left out."""
    adapter = TypeAdapter(kind)
    lines = _read(path, advice, error, LARGEST_LINES).rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            adapter.validate_json(line, strict=True)
            yield from_json(line)  # its keys in their order
        except ValidationError as fault:
            if number < len(lines):
                raise error(f"{path}, line {number:,}, is damaged ({explain(fault)}); {advice}") from fault


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, its content unchecked; empty if the file is missing, is no JSON or no object."""
    try:
        found = from_json(record_bytes(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def explain(error: ValidationError) -> str:
    """The first fault that pydantic found: "training.peak_rate = 'x': should be a valid number"."""
    fault = error.errors(include_url=False)[0]
    place = cut(".".join(str(part) for part in fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if fault["type"] in ("value_error", "json_invalid"):
        return message
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place} = {shown(fault['input'])}: {message}" if place else f"{shown(fault['input'])}: {message}"


def record_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The content of a record of at most `most` bytes. Raises: OSError, also for a larger file, a pipe or a device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device")  # which may have no end
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def _read(path: Path, advice: str, error: type[MtkitError], most: int = LARGEST) -> bytes:
    try:
        return record_bytes(path, most)
    except OSError as fault:
        raise error(f"cannot read {path}: {fault.strerror or fault}; {advice}") from fault


def _check_version(path: Path, text: bytes, version: int, advice: str, error: type[MtkitError]) -> None:
    try:
        content = from_json(text)
    except ValueError:
        return  # said where it is validated
    found = content.get("format", version) if isinstance(content, dict) else version
    if found != version:
        writer = f", as mtkit {content['mtkit']} writes it" if "mtkit" in content else ""
        raise error(
            f"{path} has format {shown(found)}{writer}; this mtkit reads format {version}: use that version, or "
            f"{advice}"
        )


def as_python(value: Any) -> Any:
    """The value, and all within its lists and mappings: numbers and arrays of numpy become numbers and lists.

    JSON knows no others, and `isinstance(value, int)` does not either.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_python(each) for key, each in value.items()}
    return type(value)(map(as_python, value)) if type(value) in (list, tuple) else value
