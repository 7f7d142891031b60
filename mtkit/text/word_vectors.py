"""Word vectors in text files: the formats of word2vec, GloVe and fastText.

A line is a word and the numbers of its vector, separated by spaces, in UTF-8. Files of word2vec and fastText begin with
a line "words width"; GloVe's do not. word2vec and early versions of fastText end lines with a space. A few words of
GloVe's largest file contain spaces ("at name@domain.com"), and word2vec cuts long words within a character.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mtkit.errors import DataError, shown
from mtkit.terminal import ProgressBar, silent
from mtkit.text.text_files import LONGEST, open_file

_BLOCK = 1 << 20
"""Bytes that are read together, and one step of the progress bar."""

_BOM = b"\xef\xbb\xbf"

_HEAD = 4096
"""Bytes at the start of a file that show whether it is binary."""

_MOST_UNREADABLE = 0.01
"""Share of lines without a readable word beyond which the file is not taken for UTF-8."""

_FEW = 10
"""Lines without a readable word that any file may have."""


class WordLine(NamedTuple):
    """A line of the file, with unparsed numbers."""

    line: int
    """Counted from 1."""
    word: str
    numbers: bytes


class WordVectors:
    """The lines of a word-vector file, also gzipped (.gz), as an iterator that reads the file once, as a stream.

    Blank lines, and lines whose word is empty or not UTF-8, are left out; `unreadable` counts the latter. Only the
    number of fields is checked in all lines; `parse` checks the numbers of a line.

    Raises: DataError, while reading, with the file and the line: for a file that is missing, empty or binary, for
    vectors of another width, for a line with another number of fields, and if more than 1% of the words are not UTF-8.
    """

    def __init__(self, path: Path, width: int, progress: ProgressBar = silent) -> None:
        """`width` is the required width of the vectors; `progress` counts MiB."""
        self.path, self.width = path, width
        self._progress = progress
        self.header: int | None = None
        """Number of words in the file's first line, if it is a header."""
        self.lines = 0
        """Lines with a vector that have been read."""
        self.unreadable: list[int] = []
        """Numbers of the lines without a readable word."""

    def __iter__(self) -> Iterator[WordLine]:
        with open_file(self.path) as file:
            # of a compressed file or a pipe, the size is unknown
            size = self.path.stat().st_size if self.path.suffix != ".gz" else 0
            steps = -(-size // _BLOCK) or None
            number = 0
            for block in self._progress(self._blocks(file), f"reading {self.path.name} (MiB)", steps):
                for line in block.removesuffix(b"\n").split(b"\n"):
                    number += 1
                    if number == 1 and self._is_header(line):
                        continue
                    entry = self._entry(number, line)
                    if entry is not None:
                        yield entry
        if self.lines == 0:
            raise DataError(f"{self.path} has no word vectors; give a file with a word and its numbers per line")

    def parse(self, entry: WordLine) -> np.ndarray:
        """Parse the numbers of a line: (width,) float32. Raises: DataError if one is not a finite number."""
        fields = entry.numbers.split()
        try:
            with np.errstate(over="ignore"):
                vector = np.array([float(field) for field in fields], dtype=np.float32)
        except ValueError:
            wrong = next(field for field in fields if not _is_number(field))
            raise self._error(entry.line, f"{shown(wrong.decode(errors='replace'))} is not a number") from None
        if len(vector) != self.width:  # of two spaces in a row, one stands for a number
            raise self._error(
                entry.line, f"{len(vector):,} numbers after the word, but the vectors have {self.width:,}"
            )
        if not np.isfinite(vector).all():
            wrong = fields[int(np.flatnonzero(~np.isfinite(vector))[0])]
            raise self._error(entry.line, f"{wrong.decode()} in the vector of {shown(entry.word)} is not finite")
        return vector

    def notes(self) -> list[str]:
        """Describe, after the file has been read, what is unusual in it."""
        notes = []
        if self.header is not None and self.header != self.lines + len(self.unreadable):
            notes.append(f"its first line announces {self.header:,} words, and it has {self.lines:,}")
        if self.unreadable:
            notes.append(
                f"{len(self.unreadable):,} lines are left out because their word is empty or not UTF-8, "
                f"the first is line {self.unreadable[0]:,}"
            )
        return notes

    def _blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the bytes in blocks that end with a line."""
        number, first = 1, True
        while block := file.read(_BLOCK):
            block += file.readline(LONGEST + 1)
            block = block.removeprefix(_BOM) if first else block
            if first and b"\0" in block[:_HEAD]:
                raise DataError(
                    f"{self.path} is binary or UTF-16, not text in UTF-8; give the unpacked text format "
                    "(.vec or .txt, also .gz)"
                )
            if len(block) > _BLOCK + LONGEST:
                raise self._error(number + block.count(b"\n"), f"longer than {LONGEST:,} bytes")
            yield block
            number, first = number + block.count(b"\n"), False

    def _is_header(self, line: bytes) -> bool:
        """Return whether the first line is a header, and check the width. Raises: DataError for another width."""
        fields = line.split()
        header = len(fields) == 2 and self.width != 1 and all(field.isdigit() for field in fields)
        if header:
            self.header, width = int(fields[0]), int(fields[1])
        else:
            # a word may be a number; a first word with spaces is not expected
            width = next(
                (count for count, field in enumerate(reversed(fields)) if not _is_number(field)), len(fields) - 1
            )
        if width < 1:
            raise self._error(1, f"{shown(line.decode(errors='replace'))} is not a word and its numbers")
        if width != self.width:
            raise DataError(
                f"{self.path}, line 1: vectors of width {width:,}, but the embeddings have width {self.width:,}; "
                f"change model.d_model, or give vectors of width {self.width:,}"
            )
        return header

    def _entry(self, number: int, line: bytes) -> WordLine | None:
        """Split a line; None for a blank one and for one without a readable word."""
        line = line.rstrip(b" \r")
        word, _, numbers = line.partition(b" ")
        if line.count(b" ") != self.width:
            fields = line.split()
            if not fields:
                return None
            word, numbers = b" ".join(fields[: -self.width]), b" ".join(fields[-self.width :])
            if len(fields) <= self.width or any(map(_is_number, fields[1 : -self.width])):
                count = sum(map(_is_number, fields[1:]))
                raise self._error(number, f"{count:,} numbers after the word, but the vectors have {self.width:,}")
        try:
            text = word.decode()
        except UnicodeDecodeError:
            text = ""
        if not text:
            self._count_unreadable(number)
            return None
        self.lines += 1
        return WordLine(number, text, numbers)

    def _count_unreadable(self, number: int) -> None:
        self.unreadable.append(number)
        count = len(self.unreadable)
        if count > _FEW and count > _MOST_UNREADABLE * number:
            raise DataError(
                f"{self.path}, line {self.unreadable[0]:,}: the word is not UTF-8, as in {count:,} of the first "
                f"{number:,} lines; convert the file from its real encoding, as with `iconv -f latin1 -t utf-8`"
            )

    def _error(self, line: int, problem: str) -> DataError:
        return DataError(
            f"{self.path}, line {line:,}: {problem}; each line is a word and the numbers of its vector: "
            "fetch the file again, or correct the line"
        )


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
