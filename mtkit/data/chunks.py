"""The text of a side in chunks, which are the units of encoding and writing; it is measured as it is read."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import json_text
from mtkit.storage.jobs import Part
from mtkit.terminal import ProgressBar
from mtkit.text.corpora import Facts, Measuring, SegmentPair, line_count, name_of, read_corpus

_PAIRS, _CHARACTERS = 10_000, 4_000_000
"""Maximum segment pairs and characters of a chunk."""

_ALIGNED = 100_000
"""Pairs of a corpus that are all checked for misaligned sides; after these, the first ones of each chunk."""

_ALIGNED_IN_CHUNK = 500


class Chunk(NamedTuple):
    """Neighbouring segment pairs of one corpus, in columns, which are quick to send to another process."""

    corpus: int
    direction: str
    lines: list[int]
    """Line numbers in the input, from 1."""
    sources: list[str]
    targets: list[str]
    documents: list[str | int | None]
    """Document ids, as in `SegmentPair`."""
    aligned: int
    """Number of leading pairs that are checked for misaligned sides."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text and the documents, in hexadecimal digits."""
        documents = any(document is not None for document in self.documents) and self.documents
        about = [self.corpus, self.direction, self.lines, documents]
        return hashlib.sha256("\n".join([json_text(about), *self.sources, *self.targets]).encode()).hexdigest()


def chunks(pairs: Iterable[SegmentPair], corpus: int, direction: str, skipped: int = 0) -> Iterator[Chunk]:
    """The pairs of a corpus in chunks that fit in memory, after `skipped` pairs, a multiple of 10,000.

    Every 10,000th pair of a corpus ends a chunk, so chunks are the same wherever reading begins.
    """
    held: list[SegmentPair] = []
    characters, number = 0, skipped
    for number, pair in enumerate(pairs, start=skipped + 1):
        held.append(pair)
        characters += len(pair.source) + len(pair.target)
        if number % _PAIRS == 0 or characters >= _CHARACTERS:
            yield _chunk(held, corpus, direction, number)
            held, characters = [], 0
    if held:
        yield _chunk(held, corpus, direction, number)


def _chunk(held: list[SegmentPair], corpus: int, direction: str, end: int) -> Chunk:
    lines, sources, targets, documents = zip(*held, strict=True)
    aligned = len(held) if end <= _ALIGNED else min(len(held), _ALIGNED_IN_CHUNK)
    return Chunk(corpus, direction, list(lines), list(sources), list(targets), list(documents), aligned)


class SideText:
    """The text of a side; `chunks` reads it, after which `facts` are available."""

    def __init__(self, name: str, corpora: Sequence[Corpus], settings: DataSettings) -> None:
        """Count the lines if that needs no reading of the text. Raises: DataError for sides of unequal length."""
        self.name, self.corpora = name, corpora
        self.lines: list[int | None] = [line_count(corpus) for corpus in corpora]
        """Segment pairs of each corpus; None if unknown."""
        self._directions = [settings.direction_of(corpus) for corpus in corpora]
        self._measuring: list[Measuring] = []

    @property
    def pairs(self) -> int | None:
        """Segment pairs of all corpora; None if unknown."""
        return None if None in self.lines else sum(lines or 0 for lines in self.lines)

    def count(self, progress: ProgressBar) -> None:
        """Count lines of unknown number by reading them. Raises: DataError as `read_corpus`."""
        for index, (corpus, lines) in enumerate(zip(self.corpora, self.lines, strict=True)):
            if lines is None:
                self.lines[index] = sum(1 for _ in progress(read_corpus(corpus), self._what("counting", index), None))

    def chunks(self, progress: ProgressBar, verb: str = "encoding") -> Iterator[Chunk]:
        """All chunks in order, read again by each call.

        Raises: DataError as `read_corpus`, for an empty corpus, and if the number of lines has changed.
        """
        self._measuring = [Measuring(name_of(corpus)) for corpus in self.corpora]
        for index, (corpus, measuring) in enumerate(zip(self.corpora, self._measuring, strict=True)):
            pairs = measuring.through(read_corpus(corpus, measuring.repairs))
            shown = progress(pairs, self._what(verb, index), self.lines[index])
            yield from chunks(shown, index, self._directions[index])
            lines = self.lines[index]
            if lines and lines != measuring.lines:
                raise DataError(
                    f"{name_of(corpus)} changed while it was read, from {lines:,} lines to {measuring.lines:,}; give "
                    "files that do not change, and no pipes"
                )
            measuring.check()

    def chunks_of(self, part: Part, progress: ProgressBar) -> Iterator[Chunk]:
        """The chunks of one part; of plain text, only that part is read.

        The blocks of 10,000 pairs of a corpus that begin in the part's share of all pairs belong to it.
        Raises: DataError as `read_corpus`; ValueError if the number of pairs is unknown.
        """
        before, pairs = 0, self.pairs
        if pairs is None:
            raise ValueError("parts need the number of pairs")
        for index, (corpus, lines) in enumerate(zip(self.corpora, self.lines, strict=True)):
            first, end = (
                _first_pair(number, part.of, pairs, before, lines or 0) for number in (part.number, part.number + 1)
            )
            before += lines or 0
            if first < end:
                rows = read_corpus(corpus, rows=range(first, end))
                shown = progress(rows, self._what("encoding", index), end - first)
                yield from chunks(shown, index, self._directions[index], first)

    @property
    def facts(self) -> list[Facts]:
        """The facts of each corpus, after `chunks` has ended."""
        return [measuring.facts for measuring in self._measuring]

    def _what(self, verb: str, index: int) -> str:
        return f"{verb} {self.name}" + (f" {index + 1}/{len(self.corpora)}" if len(self.corpora) > 1 else "")


def _first_pair(part: int, of: int, pairs: int, before: int, lines: int) -> int:
    """The first pair of a corpus in `part` or a later one; the corpus has `lines` pairs after `before` others."""
    begin = max(0, -(-pairs * (part - 1) // of) - before)  # of the part's share, in this corpus
    return min(-(-begin // _PAIRS) * _PAIRS, lines)
