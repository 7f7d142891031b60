"""Text files as lines: plain or gzipped UTF-8 in which only "\\n" ends a line."""

import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from mtkit.errors import DataError

_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20

LONGEST = 1 << 24
"""Bytes of a line, at most: what has no ends of lines, as /dev/zero, would fill the memory."""

_BLOCK = 1 << 18
"""Bytes of a file that are decoded at once: many times as fast as line by line."""


@dataclass
class Repairs:
    """What was put right while text was read; the readers count here as they go."""

    carriage_returns: int = 0
    """Carriage returns dropped at the end of a line or of a field."""
    byte_order_marks: int = 0
    """Byte order marks dropped at the start of a file."""
    inner_newlines: int = 0
    """Fields with a newline, which became a space, or was dropped at the end."""


@dataclass(frozen=True)
class Span:
    """Neighbouring lines of a file that is not packed."""

    begin: int
    """Bytes before the first of them."""
    end: int
    """Bytes of the file up to the end of the last of them."""
    before: int
    """Lines before the first of them."""


@dataclass(frozen=True)
class Lines:
    """The lines of a UTF-8 text file, or of a gzipped one (.gz), read anew by each loop and never held together.

    Only "\\n" ends a line; a "\\r" before it, and a byte order mark at the start of the file, are dropped, and counted
    in `repairs`.

    Raises: DataError, while reading, naming the file and the line that is not UTF-8, or the damaged .gz file.
    """

    path: Path
    repairs: Repairs = field(default_factory=Repairs, compare=False)
    span: Span | None = None
    """These lines alone; None: all."""

    def __iter__(self) -> Iterator[str]:
        before = 0 if self.span is None else self.span.before
        with open_file(self.path) as file:
            for block in self._blocks(file):
                if len(block) > _BLOCK + LONGEST:
                    raise _endless(str(self.path), before + 1 + block.count(b"\n"))
                lines = _sound(block)
                if lines is None:
                    each = block.removesuffix(b"\n").split(b"\n")
                    yield from decoded(each, str(self.path), self.repairs, first=before + 1)
                    before += len(each)
                else:
                    yield from lines
                    before += len(lines)

    def _blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """The bytes of the lines, each block up to the end of a line, where that is not too long."""
        left = sys.maxsize
        if self.span is not None:
            file.seek(self.span.begin)
            left = self.span.end - self.span.begin
        while block := file.read(min(_BLOCK, left)):
            if len(block) < left:
                block += file.readline(LONGEST + 1)
            left -= len(block)
            yield block


def count_lines(path: Path) -> int:
    """The lines of a plain file, by their ends alone. Raises: DataError where it cannot be read."""
    with open_file(path) as file:
        lines, last = 0, b"\n"
        while block := file.read(_BUFFER):
            lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n")


def span_of(path: Path, first: int, last: int) -> Span:
    """The lines of a plain file from `first` to before `last`, counted from 0.

    Ends of lines are counted from its start on. Raises: DataError where it cannot be read.
    """
    with open_file(path) as file:
        begin = _behind(file, first)
        file.seek(begin)
        return Span(begin, begin + _behind(file, last - first), first)


def next_line(file: BinaryIO, place: int) -> int:
    """Where the first line begins that does not begin before `place`."""
    if place == 0:
        return 0
    file.seek(place - 1)
    while (block := file.readline(_BUFFER)) and not block.endswith(b"\n"):
        pass
    return file.tell()


def _behind(file: BinaryIO, lines: int) -> int:
    """Bytes of the next so many lines; fewer where the file ends."""
    size = 0
    while lines and (block := file.read(_BUFFER)):
        ends = block.count(b"\n")
        if ends >= lines:
            return size + int(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))[lines - 1]) + 1
        lines, size = lines - ends, size + len(block)
    return size


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a binary stream as they come; of one that is too long only so much that `decoded` refuses it."""
    return iter(partial(stream.readline, LONGEST + 1), b"")


def decoded(lines: Iterable[bytes], name: str, repairs: Repairs | None = None, *, first: int = 1) -> Iterator[str]:
    """Lines of a file or stream called `name`, from line `first` on, as `Lines` gives them; its errors."""
    repairs = repairs or Repairs()
    for number, line in enumerate(lines, start=first):
        if len(line) > LONGEST:
            raise _endless(name, number)
        text = line.removesuffix(b"\n")
        if text.endswith(b"\r"):
            text = text[:-1]
            repairs.carriage_returns += 1
        if number == 1 and text.startswith(_BOM):
            text = text[len(_BOM) :]
            repairs.byte_order_marks += 1
        try:
            yield text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} is 0x{text[error.start]:02x}); "
                f"convert the file, as with `iconv -f latin1 -t utf-8`"
            ) from error


def _endless(name: str, number: int) -> DataError:
    return DataError(f"{name}, line {number}: longer than {LONGEST:,} bytes; give text with one segment a line")


def _sound(block: bytes) -> list[str] | None:
    """The lines of a block that ends where a line does; None where there is anything to repair, or no UTF-8."""
    if b"\r" in block or block.startswith(_BOM):
        return None
    try:
        return block.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """The file at `path` as bytes, unpacked where its name ends in .gz.

    Raises: DataError where it is missing, a folder or unreadable; within the block, where a .gz file is damaged.
    """
    try:
        with path.open("rb") as file:
            yield _unpacked(file) if path.suffix == ".gz" else file
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder, not a text file") from error
    except FileNotFoundError as error:
        raise DataError(f"no file {path}; check the name") from error
    except EOFError as error:
        raise DataError(f"{path} ends in the middle of its gzip data; fetch or copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a valid gzip file ({error}); fetch it again, or rename it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _unpacked(file: BinaryIO) -> BinaryIO:
    # a GzipFile finds the ends of lines by itself far more slowly than a buffer around it does
    return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file), _BUFFER))
