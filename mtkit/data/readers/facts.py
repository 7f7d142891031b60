"""What a corpus holds: counted, checked and fingerprinted in one pass."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mtkit.data.progress import ProgressBar
from mtkit.data.readers.corpora import name_of, read_corpus
from mtkit.data.readers.text import Lines, Repairs
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus

_CHUNK = 10_000
Keep = Callable[[Sequence[Sequence[Any]], int], None]
"""Is given rows, as they are measured, and their size in bytes."""

_SEPARATORS = ("\u2028", "\u2029")


@dataclass(frozen=True)
class Facts:
    """Counts, repairs and fingerprint of a corpus or a text file."""

    name: str
    """Name for messages."""
    lines: int
    """Segment pairs, or lines of the one file."""
    bytes: int
    """Bytes of the text in UTF-8, of both sides together, with one for the end of each line."""
    sha256: str
    """Hexadecimal digits of a hash of the text and the documents: the same whether it lies in text files, gzipped or
    not, or in columns, and whatever had to be put right."""
    carriage_returns: int
    """Carriage returns dropped at the end of a line or of a field."""
    byte_order_marks: int
    """Byte order marks dropped at the start of a file."""
    inner_newlines: int
    """Fields with a newline, which became a space."""
    line_separators: int
    """Characters U+2028 and U+2029, which look like ends of lines and stay in the text."""
    inner_carriage_returns: int = 0
    """Carriage returns within a line, which stay in the text; in old Macintosh files they alone end lines."""


def measure_file(path: Path) -> Facts:
    """The facts of one text file. Raises: DataError where it is missing, damaged, empty or not UTF-8."""
    repairs = Repairs()
    return _facts(str(path), enumerate(Lines(path, repairs)), repairs)


def measure_corpus(corpus: Corpus, progress: ProgressBar | None = None, keep: Keep | None = None) -> Facts:
    """The facts of a corpus, from one pass over it, on which `keep` is given all pairs, many at a time.

    Raises: DataError where it cannot be read to the end, as `read_corpus` does, or holds nothing.
    """
    repairs, name = Repairs(), name_of(corpus)
    pairs: Iterable[Any] = read_corpus(corpus, repairs)
    if progress is not None:
        pairs = progress(pairs, f"reading {name}", None)
    return _facts(name, iter(pairs), repairs, keep)


def _facts(name: str, rows: Iterator[Sequence[Any]], repairs: Repairs, keep: Keep | None = None) -> Facts:
    """Facts of rows: a number, one or two texts, an id; what hashes alike is alike, for no field has a newline."""
    lines, size, separators, returns, digest = 0, 0, 0, 0, hashlib.sha256()
    while chunk := list(islice(rows, _CHUNK)):
        lines += len(chunk)
        text = "\n".join([field for row in chunk for field in row[1:3]]) + "\n"
        encoded = text.encode()
        size += len(encoded)
        digest.update(encoded)
        if keep is not None:
            keep(chunk, len(encoded))
        digest.update(
            "".join(f"{document}\n" for row in chunk for document in row[3:] if document is not None).encode()
        )
        returns += text.count("\r")
        separators += sum(text.count(each) for each in _SEPARATORS)
    if lines == 0:
        raise DataError(f"{name} is empty; give text with one segment per line")
    return Facts(
        name,
        lines,
        size,
        digest.hexdigest(),
        line_separators=separators,
        inner_carriage_returns=returns,
        **vars(repairs),
    )
