"""Reading of JSON files with type checks; the first error of a file is reported in one line."""

import errno
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

from mtkit.errors import MtkitError, cut, shown

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Integer from 0."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Number that is neither NaN nor infinite."""

LARGEST, LARGEST_LINES = 64 << 20, 1 << 30
"""Maximum bytes of a JSON file, and of a JSON lines file: larger files are damaged, or not mtkit's."""

_KINDS = ("str", "int", "float", "list", "range")
"""Parts of a place that pydantic adds for one of several allowed types; files have no such keys."""
_PLAIN = (
    ("valid dictionary", "should be a mapping"),
    ("valid tuple", "should be a list"),
    ("at least 1 item", "is empty"),
    ("should match pattern", "is not a value that mtkit writes"),
)
"""Words of pydantic that name types of Python, and the message in their place."""

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Return pydantic's reader of a type; making one takes longer than reading a file."""

stored = with_config(ConfigDict(extra="allow"))
"""Decorator of a TypedDict that keeps unknown keys, which people and later versions may add."""


def read_stored(
    path: Path, kind: type[T], advice: str, *, error: type[MtkitError] = MtkitError, version: int | None = None
) -> T:
    """Read a JSON file as `kind`, a TypedDict or a dataclass, without type conversions.

    `version` is the required value of its key `format`. `advice` ends the message of an error.

    Raises: `error`, with file, key and value, if the file cannot be read, is not JSON, or has other types.
    """
    text = _read(path, advice, error)
    if version is not None:
        _check_version(path, text, version, advice, error)
    try:
        checked: T = _adapter(kind).validate_json(text, strict=True)
        return checked
    except ValidationError as fault:
        raise error(f"{path} is damaged ({explain(fault)}); {advice}") from fault


def read_stored_lines(path: Path, kind: type[T], advice: str, *, error: type[MtkitError] = MtkitError) -> Iterator[T]:
    """Read the lines of a JSON lines file, like `read_stored`; blank lines and a last line cut by a kill are left out.

    A file whose name ends in .gz is decompressed.
    """
    adapter = _adapter(kind)
    lines = _read(path, advice, error, LARGEST_LINES).rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            adapter.validate_json(line, strict=True)
            yield from_json(line)  # keeps the order of the keys
        except ValidationError as fault:
            if number < len(lines):
                raise error(f"{path}, line {number:,}, is damaged ({explain(fault)}); {advice}") from fault


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file without checks; {} if the file is missing or is not a JSON object."""
    try:
        content = from_json(record_bytes(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def explain(error: ValidationError) -> str:
    """Format pydantic's first error: "training.peak_rate = 'x': should be a valid number"."""
    fault = error.errors(include_url=False)[0]
    place = cut(".".join(str(part) for part in fault["loc"] if part not in _KINDS))
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = next((plain for words, plain in _PLAIN if words in message), message)
    if fault["type"] in ("value_error", "json_invalid"):
        return message
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place} = {shown(fault['input'])}: {message}" if place else f"{shown(fault['input'])}: {message}"


def record_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Read a file of at most `most` bytes. Raises: OSError, also for a larger file, a pipe or a device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device")  # reading it could block forever
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def _read(path: Path, advice: str, error: type[MtkitError], most: int = LARGEST) -> bytes:
    try:
        content = record_bytes(path, most)
        return _decompressed(path, content, most) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise error(f"cannot read {path}: {reason}; {advice}") from fault


def _decompressed(path: Path, content: bytes, most: int) -> bytes:
    """Decompress gzipped bytes. Raises: OSError if they become more than `most` bytes, or are damaged."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def _check_version(path: Path, text: bytes, version: int, advice: str, error: type[MtkitError]) -> None:
    try:
        content = from_json(text)
    except ValueError:
        return  # the validation raises
    written = content.get("format", version) if isinstance(content, dict) else version
    if written != version:
        writer = f", as mtkit {shown(content['mtkit'])} writes it" if "mtkit" in content else ""
        raise error(
            f"{path} has format {shown(written)}{writer}; this mtkit reads format {version}: use that version, or "
            f"{advice}"
        )


def as_python(value: Any) -> Any:
    """Convert numpy's numbers and arrays, also in lists and mappings, to Python's numbers and lists.

    JSON has no other types, and numpy's integers fail `isinstance(value, int)`. This does not import numpy.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_python(item) for key, item in value.items()}
    return type(value)(map(as_python, value)) if type(value) in (list, tuple) else value
