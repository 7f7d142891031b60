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

from mtkit.errors import DataError, reason

_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20

LONGEST = 1 << 24
"""Maximum bytes of a line: a file without line ends, as /dev/zero, would fill the memory."""

_UNREAD = {
    b"\x1f\x8b": ("compressed by gzip without a .gz name", "rename it, or decompress it with `gzip -dc`"),
    b"\xfd7zXZ": ("compressed by xz", "decompress it with `xz -dc`"),
    b"BZh": ("compressed by bzip2", "decompress it with `bzip2 -dc`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it with `zstd -dc`"),
    b"PK\x03\x04": ("a ZIP file", "extract its text, as with `unzip -p`"),
    b"\xff\xfe": ("not UTF-8 but UTF-16", "convert it with `iconv -f utf-16 -t utf-8`"),
    b"\xfe\xff": ("not UTF-8 but UTF-16", "convert it with `iconv -f utf-16 -t utf-8`"),
}
"""{first bytes of a file that is not UTF-8: (what it is, what to do)}."""

_BLOCK = 1 << 18
"""Bytes of a file that are decoded together, which is many times as fast as line by line."""


@dataclass
class Repairs:
    """Counts of the repairs that readers make while they read text."""

    carriage_returns: int = 0
    """Carriage returns dropped at the end of a line or of a field."""
    byte_order_marks: int = 0
    """Byte order marks dropped at the start of a file."""
    inner_newlines: int = 0
    """Fields with a newline, which was replaced by a space, or dropped at the end."""
    low_scores: int = 0
    """Pairs left out because their score is below the corpus's `least_score`."""


@dataclass(frozen=True)
class Span:
    """Neighbouring lines of an uncompressed file: bytes from `begin` to before `end`, after `before` other lines."""

    begin: int
    end: int
    before: int


@dataclass(frozen=True)
class Lines:
    """The lines of a UTF-8 text file, or of a gzipped one (.gz); each loop reads the file again, as a stream.

    Only "\\n" ends a line. A "\\r" before it and a byte order mark at the start of the file are dropped and counted in
    `repairs`. With `span`, only these lines are read.

    Raises: DataError, while reading, naming the file and the line that is not UTF-8, or the damaged .gz file.
    """

    path: Path
    repairs: Repairs = field(default_factory=Repairs, compare=False)
    span: Span | None = None

    def __iter__(self) -> Iterator[str]:
        number = 1 if self.span is None else self.span.before + 1
        with open_file(self.path) as file:
            for block in self._blocks(file):
                if len(block) > _BLOCK + LONGEST:
                    raise _too_long(str(self.path), number + block.count(b"\n"))
                lines = _decode_clean(block)
                if lines is None:
                    encoded = io.BytesIO(block).readlines()  # with line ends, without which the last line may be cut
                    yield from decode_lines(encoded, str(self.path), self.repairs, first=number)
                    number += len(encoded)
                else:
                    yield from lines
                    number += len(lines)

    def _blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the bytes in blocks that end with a line, unless that line is too long."""
        left = sys.maxsize
        if self.span is not None:
            file.seek(self.span.begin)
            left = self.span.end - self.span.begin
        while block := file.read(min(_BLOCK, left)):
            if len(block) < left:
                block += file.readline(LONGEST + 1)
            left -= len(block)
            yield block


def checked_lines(lines: Iterable[str], of: str = "") -> Iterator[str]:
    """Yield the lines without the line ends that an open file leaves; `of` follows a line's number in messages.

    Raises: DataError for a line that is not text.
    """
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(f"line {number}{of} is not text but {type(line).__name__}; give str")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"line {number}{of} has half of a surrogate pair, which is not a character") from error
        yield line.removesuffix("\n").removesuffix("\r")


def count_lines(path: Path) -> int:
    """Count the lines of an uncompressed file without decoding it. Raises: DataError if it cannot be read."""
    with open_file(path) as file:
        lines, last = 0, b"\n"
        while block := file.read(_BUFFER):
            lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n")


def find_span(path: Path, first: int, last: int) -> Span:
    """Return the lines of an uncompressed file from `first` to before `last`, counted from 0.

    Line ends are counted from the start of the file. Raises: DataError if it cannot be read.
    """
    with open_file(path) as file:
        begin = _size_of_lines(file, first)
        file.seek(begin)
        return Span(begin, begin + _size_of_lines(file, last - first), first)


def next_line(file: BinaryIO, place: int) -> int:
    """Return the offset of the first line that begins at `place` or after it."""
    if place == 0:
        return 0
    file.seek(place - 1)
    while (block := file.readline(_BUFFER)) and not block.endswith(b"\n"):
        pass
    return file.tell()


def _size_of_lines(file: BinaryIO, lines: int) -> int:
    """Return the number of bytes in the next so many lines; of fewer if the file ends before."""
    size = 0
    while lines and (block := file.read(_BUFFER)):
        ends = block.count(b"\n")
        if ends >= lines:
            return size + int(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))[lines - 1]) + 1
        lines, size = lines - ends, size + len(block)
    return size


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a stream's lines as they arrive, each cut after `LONGEST` + 1 bytes, which `decode_lines` rejects."""
    return iter(partial(stream.readline, LONGEST + 1), b"")


def decode_lines(lines: Iterable[bytes], name: str, repairs: Repairs | None = None, *, first: int = 1) -> Iterator[str]:
    """Decode the lines of a file or stream called `name`, from line `first` on; repairs and errors as `Lines`."""
    repairs = repairs or Repairs()
    for number, line in enumerate(lines, start=first):
        text = line.removesuffix(b"\n")
        if len(text) > LONGEST:
            raise _too_long(name, number)
        if text.endswith(b"\r"):
            text = text[:-1]
            repairs.carriage_returns += 1
        if number == 1 and text.startswith(_BOM):
            text = text[len(_BOM) :]
            repairs.byte_order_marks += 1
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            for start, (kind, advice) in _UNREAD.items():
                if number == 1 and text.startswith(start):
                    raise DataError(f"{name} is {kind}; {advice}") from error
            if number <= 2 and b"\0" in text:
                raise _no_mark(name) from error
            if error.reason == "unexpected end of data" and not line.endswith(b"\n"):
                raise DataError(
                    f"{name}, line {number}: the last line ends in the middle of a UTF-8 character; if the file is cut "
                    "off, fetch or copy it again, else convert it with `iconv -f ENCODING -t utf-8`"
                ) from error
            raise DataError(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} is 0x{text[error.start]:02x}); convert it "
                "with `iconv -f ENCODING -t utf-8` from its real encoding, as latin1, gb18030 or shift_jis"
            ) from error
        # UTF-16 ends lines by "\0\n" or "\n\0"
        at_the_end = text[-1:] if number == 1 else text[:1] if number == 2 else b""
        if at_the_end == b"\0" and text.strip(b"\0") and _alternates(text):
            raise _no_mark(name)
        yield decoded


def _alternates(text: bytes) -> bool:
    """Return whether a line's bytes may be UTF-16: the high bytes of most scripts are below 0x20, as no text's are."""
    high = text[1 - len(text) % 2 :: 2]  # an odd number of bytes contains the high byte of a line end
    return 2 * sum(byte < 0x20 for byte in high) > len(high)


def _no_mark(name: str) -> DataError:
    return DataError(
        f"{name} is not UTF-8, but seems to be UTF-16 without a byte order mark; convert it with "
        "`iconv -f utf-16le -t utf-8`, or from utf-16be"
    )


def _too_long(name: str, number: int) -> DataError:
    return DataError(f"{name}, line {number}: longer than {LONGEST:,} bytes; give text with one segment a line")


def _decode_clean(block: bytes) -> list[str] | None:
    """Return the lines of a block that ends with a line; None if lines must be checked one by one."""
    if b"\r" in block or b"\0" in block or block.startswith(_BOM):
        return None
    try:
        return block.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open the file at `path` as bytes, decompressed if its name ends in .gz.

    Raises: DataError if it is missing, a folder or unreadable; within the block, if a .gz file is damaged.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                # a GzipFile finds line ends far more slowly than a buffer around it
                yield cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file), _BUFFER))
            else:
                yield file
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder, not a text file; give a file") from error
    except FileNotFoundError as error:
        raise DataError(f"no file {path}; check the name") from error
    except EOFError as error:
        raise DataError(f"{path} ends in the middle of its gzip data; fetch or copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a valid gzip file ({error}); fetch it again, or rename it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error
