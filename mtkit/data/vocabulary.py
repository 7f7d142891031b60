"""The text that a tokenizer is trained on: all of it, or a sample that is spread over it.

The tokenizers of prepared data: trained on a sample of its text, or taken over.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self, TextIO

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.terminal import ProgressBar
from mtkit.text.characters import Folding
from mtkit.text.corpora import line_count, name_of, plain_files, read_corpus
from mtkit.text.text_files import Lines, Span, next_line, open_file
from mtkit.text.tokenizer import train_tokenizer

SOURCE, TARGET = 0, 1

_BYTES = 1 << 26
"""Text that is kept, at most."""

_BLOCK = 1 << 16
"""Bytes of a file that are read together where not all of it is."""

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
    """At most 64 MiB of parallel text, in files without names; a context, since these are open.

    Of plain text it is every n-th block of each file, of other text every n-th pair, and n is the smallest power of two
    that suffices: so it depends on the text alone.
    """

    def __init__(self) -> None:
        self._files: list[TextIO] = []
        self._open = ExitStack()
        self._pairs, self._size, self._every = 0, 0, 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its text, in hexadecimal digits."""
        digest = hashlib.sha256()
        for line in self.lines(SOURCE, TARGET):
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()

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

    def read(self, corpora: Sequence[Corpus], progress: ProgressBar) -> list[int] | None:
        """Take in the text of these corpora; the pairs of each, where all of it was read.

        Of plain text beyond 64 MiB, blocks are read: every n-th of each file. Raises: DataError as `read_corpus`.
        """
        files = [plain_files(corpus) for corpus in corpora]
        plain = [each[:2] for each in files if each is not None]  # ids of documents aside
        size = sum(path.stat().st_size for paths in plain for path in paths)
        if len(plain) < len(files) or size <= _BYTES:
            return [self._read_all(corpus, progress) for corpus in corpora]
        self._files = [self._file(), self._file()]
        every = next(2**power for power in count() if size <= _BYTES * 2**power)
        for corpus, paths in progress(list(zip(corpora, plain, strict=True)), "reading for the tokenizer", len(plain)):
            try:
                for file, path in zip(self._files, paths, strict=True):
                    file.writelines(f"{line}\n" for span in _blocks(path, every) for line in Lines(path, span=span))
            except DataError:
                deque(read_corpus(corpus), maxlen=0)  # from the beginning, for the number of the line
                raise
        return None

    def _read_all(self, corpus: Corpus, progress: ProgressBar) -> int:
        pairs, lines = iter(progress(read_corpus(corpus), f"reading {name_of(corpus)}", line_count(corpus))), 0
        while chunk := list(islice(pairs, _CHUNK)):
            self.add(chunk, sum(len(pair.source.encode()) + len(pair.target.encode()) + 2 for pair in chunk))
            lines += len(chunk)
        if not lines:
            raise DataError(f"{name_of(corpus)} is empty; give text with one segment per line")
        return lines

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


def _blocks(path: Path, every: int) -> Iterator[Span]:
    """The lines that begin in every n-th block of a file; they have no numbers."""
    with open_file(path) as file:
        for begin in range(0, path.stat().st_size, every * _BLOCK):
            yield Span(next_line(file, begin), next_line(file, begin + _BLOCK), 0)


def make_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """Write the tokenizers of the training text that `sample` is of, or those that are taken over, to a new folder."""
    folder.mkdir()
    if settings.tokenizer_from is not None:
        copy_tokenizers(settings.tokenizer_from / "tokenizer", folder)
        return
    several = len(settings.directions) > 1
    languages = list(dict.fromkeys(each.partition("-")[2] for each in settings.directions)) if several else []
    rule = settings.tokenizer.normalization
    folding = None if rule == "identity" else Folding(rule)
    if folding is not None:
        (folder / "folding.model").write_bytes(folding.model)
        sample.fold(folding.lines)
    trained = {"joint": (SOURCE, TARGET)} if settings.tokenizer.joint else {"source": (SOURCE,), "target": (TARGET,)}
    for name, sides in trained.items():
        for _ in progress([name], f"training the {name} tokenizer", None):
            train_tokenizer(folder / f"{name}.model", sample.lines(*sides), settings.tokenizer, languages)


def vocabulary_of(folder: Path) -> str:
    """Fingerprint of the tokenizers in a folder: where it is the same, the same pieces have the same numbers."""
    models = sorted(folder.glob("*.model"))
    return hashlib.sha256(b"".join(each.name.encode() + each.read_bytes() for each in models)).hexdigest()


def copy_tokenizers(source: Path, target: Path) -> None:
    """Copy the tokenizers of a folder into another, which is there."""
    for model in sorted(source.glob("*.model")):
        (target / model.name).write_bytes(model.read_bytes())
