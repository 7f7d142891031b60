"""Reading parallel text: plain UTF-8 files, one segment a line, both sides with the same number of lines."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mtkit.data_settings import TextPair
from mtkit.errors import DataError

_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Lines:
    """The lines of a UTF-8 text file, read anew by each loop and never held together.

    Only "\\n" ends a line; a "\\r" before it, and a byte order mark at the start of the file, are dropped.

    Raises: DataError, while reading, naming the file and the line that is not UTF-8.
    """

    path: Path

    def __iter__(self) -> Iterator[str]:
        with _open(self.path) as file:
            yield from decoded(file, str(self.path))


def decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a binary file or stream called `name`, as `Lines` gives them, and with its errors."""
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield (text.removeprefix(_BOM) if number == 1 else text).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} is 0x{text[error.start]:02x}); "
                f"convert the file, as with `iconv -f latin1 -t utf-8`"
            ) from error


@dataclass(frozen=True)
class Facts:
    """What a file holds: its lines, its bytes, and the SHA-256 of its content in hexadecimal digits."""

    lines: int
    bytes: int
    sha256: str


def measure(path: Path) -> Facts:
    """Count, check and fingerprint a text file in one pass.

    Raises: DataError where it is missing, unreadable, empty or not UTF-8.
    """
    lines, size, digest, last = 0, 0, hashlib.sha256(), b""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
            _check(path, decoder, chunk)
            lines += chunk.count(b"\n")
            size += len(chunk)
            digest.update(chunk)
            last = chunk[-1:]
    if size == 0:
        raise DataError(f"{path} is empty; give a file with one segment a line")
    _check(path, decoder, b"", final=True)
    return Facts(lines + (last != b"\n"), size, digest.hexdigest())


def measure_pair(pair: TextPair) -> tuple[Facts, Facts]:
    """The facts of both files. Raises: DataError where one cannot be used, or their line counts differ."""
    source, target = measure(pair.source), measure(pair.target)
    if source.lines != target.lines:
        raise DataError(
            f"{pair.source} has {source.lines:,} lines and {pair.target} has {target.lines:,}; "
            f"line N of one must translate line N of the other, so give two files that belong together"
        )
    return source, target


def read_pairs(pair: TextPair) -> Iterator[tuple[str, str]]:
    """The segment pairs of two files in order. Raises: DataError as `Lines` does, or where one file ends early."""
    try:
        yield from zip(Lines(pair.source), Lines(pair.target), strict=True)
    except ValueError as error:
        raise DataError(f"{pair.source} or {pair.target} changed while it was read; run the command again") from error


def _check(path: Path, decoder: codecs.IncrementalDecoder, chunk: bytes, final: bool = False) -> None:
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError:
        for _ in Lines(path):
            pass  # raises at the line that is to blame
        raise


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder, not a text file") from error
    except FileNotFoundError as error:
        raise DataError(f"no file {path}; check the name") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
