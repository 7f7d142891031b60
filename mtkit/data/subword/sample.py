"""The text that a tokenizer is trained on: a sample of what is read anyway, so nothing is read for it alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryFile
from typing import Any, Self, TextIO

from mtkit.data.progress import ProgressBar
from mtkit.data.readers import read_corpus
from mtkit.recipe.data import Corpus

SOURCE, TARGET = 0, 1

_BYTES = 1 << 26
"""Text that is kept, at most."""

_CHUNK = 10_000


@dataclass(frozen=True)
class SampleLines:
    """The lines of open text files, one file after the other, from the first whenever they are gone through."""

    files: Sequence[TextIO]

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            file.seek(0)
            for line in file:
                yield line.removesuffix("\n")


class TextSample:
    """Every n-th pair of a stream of pairs, in files without names; a context, since these are open.

    n is the smallest power of two with which the text is at most 64 MiB, so it depends on the text's bytes alone.
    """

    def __init__(self) -> None:
        self._files: list[TextIO] = []
        self._open = ExitStack()
        self._pairs, self._size, self._every = 0, 0, 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __bool__(self) -> bool:
        """Whether any pair was added."""
        return self._pairs > 0

    def add(self, rows: Sequence[Sequence[Any]], size: int) -> None:
        """Take in the next pairs, (line, source, target, ...) each, that are `size` bytes with the ends of lines."""
        self._files = self._files or [self._file(), self._file()]
        first = -self._pairs % self._every
        for side, file in enumerate(self._files, start=1):
            file.writelines(f"{row[side]}\n" for row in islice(rows, first, None, self._every))
        self._pairs += len(rows)
        self._size += size
        while self._size > _BYTES * self._every:
            self._every *= 2
            self._files = [self._thinned(file) for file in self._files]

    def read(self, corpora: Sequence[Corpus], progress: ProgressBar) -> None:
        """Take in the text of these corpora. Raises: DataError as `read_corpus`."""
        pairs = iter(
            progress((pair for each in corpora for pair in read_corpus(each)), "reading for the tokenizer", None)
        )
        while chunk := list(islice(pairs, _CHUNK)):
            self.add(chunk, sum(len(pair.source.encode()) + len(pair.target.encode()) + 2 for pair in chunk))

    def fold(self, lines: Callable[[Sequence[str]], list[str]]) -> None:
        """Write the sources anew as `lines` makes them, many at a time."""
        folded = self._file()
        given = iter(self.lines(SOURCE))
        while chunk := list(islice(given, _CHUNK)):
            folded.writelines(f"{line}\n" for line in lines(chunk))
        self._files[SOURCE].close()
        self._files[SOURCE] = folded

    def lines(self, *sides: int) -> "SampleLines":
        """The lines of these sides, `SOURCE` or `TARGET`, one side after the other, as often as they are asked for.

        One iteration at a time.
        """
        return SampleLines([self._files[side] for side in sides])

    def _file(self) -> TextIO:
        # it has no name, so nothing of it stays behind where the process is killed
        return self._open.enter_context(TemporaryFile("w+", encoding="utf-8", newline="\n"))

    def _thinned(self, file: TextIO) -> TextIO:
        thinner = self._file()
        file.seek(0)
        thinner.writelines(islice(file, 0, None, 2))
        file.close()
        return thinner
