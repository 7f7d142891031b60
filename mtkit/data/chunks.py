"""Parts of a large file or text, which any machines work on; the parts of one division, found beside their output.

The text of a side in chunks, measured as it is read: what is encoded, and written, at a time.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtkit.errors import DataError, MtkitError, cut
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import inside, json_text
from mtkit.terminal import ProgressBar
from mtkit.text.readers import Facts, Measuring, SegmentPair, line_count, name_of, read_corpus

_NAMED = 10


@dataclass(frozen=True)
class FilePart:
    """One of several parts: of a file, the lines that begin in its share of the bytes; of text, its share of pairs."""

    number: int
    """From 1."""
    of: int

    @classmethod
    def named(cls, name: str) -> "FilePart":
        """The part that is called 2/8. Raises: MtkitError for another form of name."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", name)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise MtkitError(f"--part {cut(name)} is no part; the second of eight is --part 2/8")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def output(self, path: Path) -> Path:
        """The file of this part of an output. Raises: MtkitError if it is a link."""
        return inside(path.parent, f"{path.name}.part-{self.number}-of-{self.of}")

    def record(self, output: Path) -> Path:
        """The file that tells what this part of an output is made of. Raises: MtkitError if it is a link."""
        return inside(output.parent, f"{self.output(output).name}.json")


def all_parts(outputs: Sequence[Path], finished: Callable[[FilePart], bool], verb: str) -> list[FilePart]:
    """The parts of these outputs, by the files beside them; `verb` says what makes a part, for messages.

    Raises: DataError where one is missing or not `finished`, or where files are parts of different divisions.
    """
    names = re.compile(rf"{re.escape(outputs[0].name)}\.part-([0-9]+)-of-([0-9]+)(\.json)?")
    found = [names.fullmatch(each.name) for each in outputs[0].parent.glob("*.part-*-of-*")]
    divisions = sorted({int(each[2]) for each in found if each})
    if not divisions:
        raise DataError(f"no parts of {outputs[0]}; {verb} them first, with --part 1/8 to 8/8")
    if len(divisions) > 1:
        raise DataError(
            f"{outputs[0]} has parts of {' and of '.join(map(str, divisions))}; remove those that are not wanted"
        )
    parts = [FilePart(number + 1, divisions[0]) for number in range(divisions[0])]
    if missing := [part.number for part in parts if not finished(part)]:
        listed = ", ".join(map(str, missing[:_NAMED]))
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise DataError(
            f"of {len(parts):,} parts of {' and '.join(map(str, outputs))}, {len(missing):,} are missing or not "
            f"finished: {listed}{more}; {verb} with --part {missing[0]}/{len(parts)} and so on"
        )
    return parts


_PAIRS, _CHARACTERS = 10_000, 4_000_000
"""Segment pairs, and characters of them, that a chunk has at most."""

_ALIGNED = 100_000
"""Lines of a corpus that are all looked at for sides that do not match; beyond, some of each chunk."""

_ALIGNED_IN_CHUNK = 500


class Chunk(NamedTuple):
    """Segment pairs that stand together in one corpus, by columns: these are quick to send to another process."""

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
        """SHA-256 of its text and documents, in hexadecimal digits."""
        about = [
            self.corpus,
            self.direction,
            self.lines,
            any(each is not None for each in self.documents) and self.documents,
        ]
        return hashlib.sha256("\n".join([json_text(about), *self.sources, *self.targets]).encode()).hexdigest()


def chunks(pairs: Iterable[SegmentPair], corpus: int, direction: str, before: int = 0) -> Iterator[Chunk]:
    """The pairs of a corpus in chunks, each small enough to be held, from behind those `before`, a multiple of 10,000.

    Every 10,000th pair of a corpus ends a chunk, so chunks are the same wherever reading begins.
    """
    held: list[SegmentPair] = []
    characters, number = 0, before
    for number, pair in enumerate(pairs, start=before + 1):
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
    """The text of a side; `chunks` reads it once, and then `facts` tell what was read."""

    def __init__(self, name: str, corpora: Sequence[Corpus], settings: DataSettings) -> None:
        """Counts the lines where that takes no reading of the text. Raises: DataError where sides are not equal."""
        self.name, self.corpora = name, corpora
        self.lines: list[int | None] = [line_count(corpus) for corpus in corpora]
        """Segment pairs of each corpus; None where they are not known."""
        self._directions = [settings.direction_of(corpus) for corpus in corpora]
        self._measuring: list[Measuring] = []

    @property
    def pairs(self) -> int | None:
        """Segment pairs in all; None where they are not known."""
        return None if None in self.lines else sum(each or 0 for each in self.lines)

    def count(self, progress: ProgressBar) -> None:
        """Count the lines that are not known, by reading them. Raises: DataError as `read_corpus`."""
        for index, (corpus, lines) in enumerate(zip(self.corpora, self.lines, strict=True)):
            if lines is None:
                self.lines[index] = sum(1 for _ in progress(read_corpus(corpus), self._what("counting", index), None))

    def chunks(self, progress: ProgressBar, verb: str = "encoding") -> Iterator[Chunk]:
        """All chunks in order, read anew.

        Raises: DataError as `read_corpus`, where a corpus holds nothing, and where it has other lines than before.
        """
        self._measuring = [Measuring(name_of(corpus)) for corpus in self.corpora]
        for index, (corpus, measuring) in enumerate(zip(self.corpora, self._measuring, strict=True)):
            pairs = measuring.through(read_corpus(corpus, measuring.repairs))
            shown = progress(pairs, self._what(verb, index), self.lines[index])
            yield from chunks(shown, index, self._directions[index])
            lines, there = self.lines[index], measuring.lines
            if lines and lines != there:
                raise DataError(
                    f"{name_of(corpus)} changed while it was read, from {lines:,} lines to {there:,}; give files that "
                    "do not change, and no pipes"
                )
            measuring.check()

    def chunks_of(self, part: FilePart, progress: ProgressBar) -> Iterator[Chunk]:
        """The chunks of one part; plain text is read from its beginning on.

        A part has those 10,000 pairs of a corpus, from a multiple of 10,000 on, that begin in its share of all pairs.
        Raises: DataError as `read_corpus`; ValueError where the number of pairs is not known.
        """
        before, pairs = 0, self.pairs
        if pairs is None:
            raise ValueError("parts need the number of pairs")
        for index, (corpus, lines) in enumerate(zip(self.corpora, self.lines, strict=True)):
            first, last = (
                _first_of(each, part.of, pairs, before, lines or 0) for each in (part.number, part.number + 1)
            )
            before += lines or 0
            if first < last:
                read = progress(
                    read_corpus(corpus, rows=range(first, last)), self._what("encoding", index), last - first
                )
                yield from chunks(read, index, self._directions[index], first)

    @property
    def facts(self) -> list[Facts]:
        """The facts of each corpus, once `chunks` has come to its end."""
        return [measuring.facts for measuring in self._measuring]

    def _what(self, verb: str, index: int) -> str:
        return f"{verb} {self.name}" + (f" {index + 1}/{len(self.corpora)}" if len(self.corpora) > 1 else "")


def _first_of(part: int, of: int, pairs: int, before: int, lines: int) -> int:
    """The first pair of a corpus, which has so many lines and pairs before it, that no part before `part` has."""
    begin = max(0, -(-pairs * (part - 1) // of) - before)  # the share's, in this corpus
    return min(-(-begin // _PAIRS) * _PAIRS, lines)
