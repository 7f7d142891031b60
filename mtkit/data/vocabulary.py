"""The tokenizers of prepared data: trained on a sample of its text, or copied from a run or other prepared data."""

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
from mtkit.text.tokenizer_training import train_tokenizer

SOURCE, TARGET = 0, 1

_BYTES = 1 << 26
"""Maximum size of a sample."""

_BLOCK = 1 << 16
"""Bytes of a file that are read together if only a sample of it is read."""

_CHUNK = 10_000


@dataclass(frozen=True)
class SampleLines:
    """The lines of open text files, one file after the other; each loop begins at the first. One loop at a time."""

    files: Sequence[TextIO]

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            file.seek(0)
            for line in file:
                yield line.removesuffix("\n")


class TextSample:
    """At most 64 MiB of parallel text, in open files without names; a context manager that closes them.

    Plain text is sampled by every n-th block of each file, other text by every n-th pair. n is the smallest power of
    two that suffices, so the sample depends only on the text.
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
        """Add the next pairs, (line, source, target, ...) each, of `size` bytes with line ends."""
        self._files = self._files or [self._file(), self._file()]
        first = -self._pairs % self._every
        for side, file in enumerate(self._files, start=1):
            file.writelines(f"{row[side]}\n" for row in islice(rows, first, None, self._every))
        self._pairs += len(rows)
        self._size += size
        while self._size > _BYTES * self._every:
            self._every *= 2
            self._files = [self._halve(file) for file in self._files]

    def read(self, corpora: Sequence[Corpus], progress: ProgressBar) -> list[int] | None:
        """Sample these corpora; return the number of pairs in each, or None if only blocks were read.

        Blocks are read of plain text beyond 64 MiB. Raises: DataError as `read_corpus`.
        """
        files = [plain_files(corpus) for corpus in corpora]
        text_files = [paths[:2] for paths in files if paths is not None]  # without document ids
        size = sum(path.stat().st_size for paths in text_files for path in paths)
        if len(text_files) < len(files) or size <= _BYTES:
            return [self._read_all(corpus, progress) for corpus in corpora]
        self._files = [self._file(), self._file()]
        every = next(2**power for power in count() if size <= _BYTES * 2**power)
        for corpus, paths in progress(
            list(zip(corpora, text_files, strict=True)), "reading for the tokenizer", len(text_files)
        ):
            try:
                for file, path in zip(self._files, paths, strict=True):
                    file.writelines(f"{line}\n" for span in _blocks(path, every) for line in Lines(path, span=span))
            except DataError:
                deque(read_corpus(corpus), maxlen=0)  # from the beginning, to find the line's number
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

    def fold(self, fold_lines: Callable[[Sequence[str]], list[str]]) -> None:
        """Replace the sources by what `fold_lines` makes of them, many at a time."""
        folded = self._file()
        sources = iter(self.lines(SOURCE))
        while chunk := list(islice(sources, _CHUNK)):
            folded.writelines(f"{line}\n" for line in fold_lines(chunk))
        self._files[SOURCE].close()
        self._files[SOURCE] = folded

    def lines(self, *sides: int) -> SampleLines:
        """Return the lines of these sides, `SOURCE` or `TARGET`, one side after the other."""
        return SampleLines([self._files[side] for side in sides])

    def _file(self) -> TextIO:
        # a file without a name is not left over if the process is killed
        return self._open.enter_context(TemporaryFile("w+", encoding="utf-8", newline="\n"))

    def _halve(self, file: TextIO) -> TextIO:
        half = self._file()
        file.seek(0)
        half.writelines(islice(file, 0, None, 2))
        file.close()
        return half


def _blocks(path: Path, every: int) -> Iterator[Span]:
    """Yield the lines that begin in every n-th block of a file, without line numbers."""
    with open_file(path) as file:
        for begin in range(0, path.stat().st_size, every * _BLOCK):
            yield Span(next_line(file, begin), next_line(file, begin + _BLOCK), 0)


def make_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """Write tokenizers to a new folder: trained on a sample of the training text, or copied from `tokenizer_from`."""
    folder.mkdir()
    if settings.tokenizer_from is not None:
        copy_tokenizers(settings.tokenizer_from / "tokenizer", folder)
        return
    several = len(settings.directions) > 1
    languages = [direction.partition("-")[2] for direction in settings.directions] if several else []
    rule = settings.tokenizer.normalization
    if rule != "identity":
        folding = Folding(rule)
        (folder / "folding.model").write_bytes(folding.model)
        sample.fold(folding.lines)
    sides = {"joint": (SOURCE, TARGET)} if settings.tokenizer.joint else {"source": (SOURCE,), "target": (TARGET,)}
    for name, members in sides.items():
        for _ in progress([name], f"training the {name} tokenizer", None):
            lines = sample.lines(*members)
            train_tokenizer(folder / f"{name}.model", lines, settings.tokenizer, list(dict.fromkeys(languages)))


def vocabulary_of(folder: Path) -> str:
    """Return the fingerprint of the tokenizers in a folder; if it is equal, so are the numbers of all pieces."""
    models = sorted(folder.glob("*.model"))
    return hashlib.sha256(b"".join(model.name.encode() + model.read_bytes() for model in models)).hexdigest()


def copy_tokenizers(source: Path, target: Path) -> None:
    """Copy the tokenizers of a folder to another, which exists."""
    for model in sorted(source.glob("*.model")):
        (target / model.name).write_bytes(model.read_bytes())
