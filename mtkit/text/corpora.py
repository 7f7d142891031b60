"""Where two sides of a corpus stop matching because a line is missing in one of them.

Segment pairs, and the documents that they belong to.

A corpus as a stream of segment pairs, wherever it comes from.

What a corpus holds: counted, checked and fingerprinted in one pass.

The languages of text for which the settings name none: from file names, or from the script of the text.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.terminal import ProgressBar, silent
from mtkit.text.characters import ODDITIES
from mtkit.text.tables import Cell, jsonl_rows, tsv_rows
from mtkit.text.text_files import Lines, Repairs, count_lines, span_of

_ENOUGH = 6.0
"""Evidence at which a shift counts as found: a dozen lines of natural text, where the sides are off by one."""

_BEYOND_CHANCE = 3.0
"""How many times the evidence must be what it came to at most for shifts by more lines, which nobody looks for."""

_FAR = (3, 5)
"""Such shifts: near enough that neighbours in a text have as much in common."""

_ALLOWANCE = 0.1
"""Evidence for a shift, a line, that is put down to chance. On natural text that matches, the evidence is -0.3 to -1.1
a line, and as much above zero where the sides are off by one."""

_LENGTH = 1.5
"""Most that the lengths of two segments can speak against them."""


def first_suspicious(pairs: Iterable[tuple[str, str]]) -> int | None:
    """The line, from 1, from where on lines match their neighbour's translation better than their own; None if none.

    Two segments match by their lengths, the words that stand in both (names, numbers, markup), and their last
    character. The evidence that the sides are off by one is summed line by line, and starts anew at zero whenever it
    falls below (the CUSUM test: Page, Biometrika 1954, https://doi.org/10.2307/2333009): where it grows past a bound,
    it began to grow at about the first line that is off. The answer is mostly good to within a few lines.
    Where sides say little about each other, as a task's codes and labels, such sums wander: so do those for shifts by
    more lines, and what they come to by chance is no evidence. Sides that are off by several lines at once may so be
    taken for sides that match.
    """
    evidence = {(side, shift): 0.0 for side in ("source", "target") for shift in (1, *_FAR)}
    began = {"source": 1, "target": 1}
    by_chance = 0.0
    ratio = 0.0  # how much longer sources are than targets on average, as a logarithm
    for number, window in enumerate(_windows(pairs), start=1):
        (source, target), following = window[0], window[1]
        ratio += (source.length - target.length - ratio) / (number + 1)
        straight = (_match(source, target, ratio) + _match(*following, ratio)) / 2
        for (side, shift), before in evidence.items():
            if shift < len(window):
                other = (source, window[shift][1]) if side == "source" else (window[shift][0], target)
                evidence[side, shift] = max(0.0, before + _match(*other, ratio) - straight - _ALLOWANCE)
        by_chance = max(by_chance, *(most for (_, shift), most in evidence.items() if shift != 1))
        for side, line in began.items():
            if evidence[side, 1] == 0.0:
                began[side] = number + 1
            elif evidence[side, 1] > max(_ENOUGH, _BEYOND_CHANCE * by_chance):
                return line
    return None


def _windows(pairs: Iterable[tuple[str, str]]) -> Iterator[Sequence[tuple["_Segment", "_Segment"]]]:
    """Each pair but the last with those behind it that a shift may reach."""
    window: deque[tuple[_Segment, _Segment]] = deque()
    for source, target in pairs:
        window.append((_Segment.of(source), _Segment.of(target)))
        if len(window) > _FAR[-1]:
            yield window
            window.popleft()
    while len(window) > 1:
        yield window
        window.popleft()


class _Segment(NamedTuple):
    length: float
    words: frozenset[str]
    last: str

    @classmethod
    def of(cls, text: str) -> "_Segment":
        # a few characters more on both sides make the ratio of short lengths less wild
        return cls(math.log(len(text) + 8), frozenset(text.split()), text.rstrip()[-1:])


def _match(source: _Segment, target: _Segment, ratio: float) -> float:
    """How well two segments go together: more for common words and the same end, less the further lengths part."""
    apart = 2 * abs(source.length - target.length - ratio)
    same_end = 0.5 if source.last == target.last else 0.0
    score = same_end - (apart if apart < _LENGTH else _LENGTH)
    if source.words.isdisjoint(target.words):  # as nearly all are
        return score
    return score + 2 * len(source.words & target.words) / min(len(source.words), len(target.words))


EMPTY_LINES = "empty-lines"
"""Setting by which lines that are empty on both sides part the documents."""


class SegmentPair(NamedTuple):
    """A segment and its translation, each one line of text."""

    line: int
    """Line of the input, from 1; in Parquet files and data sets the row, from 1."""
    source: str
    target: str
    document: str | int | None = None
    """Id of the document; None where the corpus has no documents. A new document begins where the id changes."""


def parted_by_empty_lines(pairs: Iterable[SegmentPair]) -> Iterator[SegmentPair]:
    """The same pairs, numbered by document from 1: a pair with both sides empty is the last of its document.

    It stays in the stream, so that what is translated line by line keeps its lines.
    """
    document = 1
    for line, source, target, _ in pairs:
        yield SegmentPair(line, source, target, document)
        document += not source.strip() and not target.strip()


def read_corpus(corpus: Corpus, repairs: Repairs | None = None, *, rows: range | None = None) -> Iterator[SegmentPair]:
    """The segment pairs of a corpus in order, read anew by each call and never held together.

    What is put right on the way is counted in `repairs`. Pairs with an empty side are pairs like all others. Only
    these `rows`, counted from 0, where they are given; what lies before them is not read in plain text without
    documents that empty lines part.

    Raises: DataError, while reading, where something is missing or damaged, is no text, or where the two sides (or the
    ids of the documents) are not equally many.
    """
    repairs = repairs or Repairs()
    parted = corpus.documents == EMPTY_LINES
    if rows is not None and not parted and plain_files(corpus) is not None:
        return _parallel(corpus, repairs, rows)
    pairs = _pairs(corpus, repairs)
    pairs = parted_by_empty_lines(pairs) if parted else pairs
    return pairs if rows is None else islice(pairs, rows.start, rows.stop)


def plain_files(corpus: Corpus) -> list[Path] | None:
    """The text files of a corpus, if they can be read from the middle; None for others, packed ones and pipes."""
    if _place(corpus) is not None:
        return None
    paths = _paths(corpus)
    return paths if all(path.suffix != ".gz" and path.is_file() for path in paths) else None


def line_count(corpus: Corpus) -> int | None:
    """The segment pairs of a corpus of plain text; None of others. Raises: DataError where its files are unequal."""
    paths = plain_files(corpus)
    if paths is None:
        return None
    counts = [count_lines(path) for path in paths]
    if len(set(counts)) > 1:
        raise _unequal(paths)
    return counts[0]


def name_of(corpus: Corpus, side: Literal["source", "target"] | None = None) -> str:
    """What messages call a corpus, or one side of it: the file, and the column where there are several in it."""
    given = {"source": corpus.source, "target": corpus.target}
    place = _place(corpus)
    if place is None:
        return str(given[side]) if side else f"{corpus.source} and {corpus.target}"
    return f"{place}, column {given[side]}" if side else place


def _place(corpus: Corpus) -> str | None:
    """The one place that holds both sides, or None for two files."""
    if corpus.dataset is not None:
        return " ".join(str(part) for part in (corpus.dataset, corpus.subset, corpus.split) if part)
    return None if corpus.file is None else str(corpus.file)


def _pairs(corpus: Corpus, repairs: Repairs) -> Iterator[SegmentPair]:
    if _place(corpus) is None:
        yield from _parallel(corpus, repairs)
        return
    for line, cells in _rows(corpus, repairs):
        source, target = cells[:2]
        if not isinstance(source, str) or not isinstance(target, str):
            side: Literal["source", "target"] = "target" if isinstance(source, str) else "source"
            raise DataError(f"{name_of(corpus, side)}, line {line}: a number, not text")
        yield SegmentPair(line, source, target, *cells[2:])


def _paths(corpus: Corpus) -> list[Path]:
    """Two text files, and one with the documents' ids where there is one."""
    documents = None if corpus.documents == EMPTY_LINES else corpus.documents
    return [Path(str(path)) for path in (corpus.source, corpus.target, documents) if path is not None]


def _parallel(corpus: Corpus, repairs: Repairs, rows: range | None = None) -> Iterator[SegmentPair]:
    """The pairs of two text files, with the documents' ids where a third file holds them."""
    paths = _paths(corpus)
    spans = [None if rows is None else span_of(path, rows.start, rows.stop) for path in paths]
    lines = [Lines(path, repairs, span) for path, span in zip(paths, spans, strict=True)]
    try:
        for number, texts in enumerate(zip(*lines, strict=True), start=1 if rows is None else rows.start + 1):
            yield SegmentPair(number, *texts)
    except ValueError as error:
        raise _unequal(paths) from error


def _rows(corpus: Corpus, repairs: Repairs) -> Iterator[tuple[int, list[Cell]]]:
    """The rows of one file or data set: source, target, and the document's id where a column holds it."""
    gaps = corpus.documents == EMPTY_LINES
    given = (corpus.source, corpus.target, None if gaps else corpus.documents)
    columns = [str(column) for column in given if column is not None]
    if corpus.file is None:
        from mtkit.text.tables import dataset_rows

        split, streaming = corpus.split, corpus.streaming
        return dataset_rows(str(corpus.dataset), corpus.subset, split, columns, repairs, streaming=streaming)
    kind = Path(corpus.file.name.removesuffix(".gz")).suffix
    if kind == ".tsv":
        return tsv_rows(corpus.file, columns, repairs, gaps=gaps)
    if kind == ".jsonl":
        return jsonl_rows(corpus.file, columns, repairs, gaps=gaps)
    if corpus.file.suffix == ".parquet":
        from mtkit.text.tables import parquet_rows

        return parquet_rows(corpus.file, columns, repairs)
    raise DataError(f"{corpus.file} has an unknown format; give .tsv, .jsonl (either with .gz) or .parquet")


def _unequal(paths: list[Path]) -> DataError:
    """What to say of files that go together, but not line by line."""
    counts = [sum(1 for _ in Lines(path)) for path in paths]
    (source, target), other = paths[:2], paths[2:]
    if counts[0] != counts[1]:
        where = first_suspicious(zip(Lines(source), Lines(target), strict=False))
        hint = f"they seem to part at about line {where:,}" if where else "no line looks like the first that is off"
        return DataError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; {hint}; "
            f"line N of one must translate line N of the other, so give two files that belong together"
        )
    if other and counts[2] != counts[0]:
        return DataError(
            f"{other[0]} has {counts[2]:,} lines and {source} has {counts[0]:,}; "
            f"line N of the first must be the id of the document that line N of the other belongs to"
        )
    return DataError(f"{source} or {target} changed while it was read; run the command again")


_Row = TypeVar("_Row", bound=Sequence[Any])

_ROWS, _BLOCK = 1_000, 10_000
"""Rows that are measured together; and those after which the ids of their documents are, a multiple."""

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
    oddities: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """For each of `ODDITIES` that is there, by side: the number of lines that have it, and the first of them."""


class Measuring:
    """Measures rows as they are read: a number, one or two texts, an id each."""

    def __init__(self, name: str) -> None:
        """`name`: what messages call them. Whatever reads the rows counts its `repairs`."""
        self.name, self.repairs = name, Repairs()
        self.lines = 0
        """Rows so far."""
        self._digest = hashlib.sha256()
        self._documents: list[str] = []
        self._bytes = self._returns = self._separators = 0
        self._oddities: dict[str, dict[str, list[int]]] = {}

    def through(self, rows: Iterable[_Row]) -> Iterator[_Row]:
        """The same rows, measured some before they are given."""
        rows = iter(rows)
        while chunk := list(islice(rows, _ROWS)):
            self._add(chunk)
            yield from chunk

    def _add(self, rows: Sequence[Sequence[Any]]) -> None:
        """What hashes alike is alike, for no field has a newline."""
        text = "\n".join([field for row in rows for field in row[1:3]]) + "\n"
        encoded = text.encode()
        self._digest.update(encoded)
        self._documents += [f"{document}\n" for row in rows for document in row[3:] if document is not None]
        self.lines += len(rows)
        if self.lines % _BLOCK == 0:
            self._digest.update("".join(self._documents).encode())
            self._documents.clear()
        self._bytes += len(encoded)
        self._returns += text.count("\r")
        self._separators += sum(text.count(each) for each in _SEPARATORS)
        for kind, has in ODDITIES.items():
            if has(text.replace("\n", " ") if kind == "invisible" else text):
                self._add_oddities(kind, has, rows)

    def _add_oddities(self, kind: str, has: Callable[[str], bool], rows: Sequence[Sequence[Any]]) -> None:
        for place, side in enumerate(("source", "target"), start=1):
            numbers = [row[0] for row in rows if place < len(row) and has(row[place])]
            if numbers:
                known = self._oddities.setdefault(kind, {}).setdefault(side, [0, numbers[0]])
                known[0] += len(numbers)

    def check(self) -> None:
        """Raises: DataError where there was no row."""
        if self.lines == 0:
            raise DataError(f"{self.name} is empty; give text with one segment per line")

    @property
    def facts(self) -> Facts:
        """The facts of all rows so far. Raises: DataError where there was none."""
        self.check()
        digest = self._digest.copy()
        digest.update("".join(self._documents).encode())
        return Facts(
            self.name,
            self.lines,
            self._bytes,
            digest.hexdigest(),
            line_separators=self._separators,
            inner_carriage_returns=self._returns,
            oddities=self._oddities,
            **vars(self.repairs),
        )


def measure_file(path: Path) -> Facts:
    """The facts of one text file. Raises: DataError where it is missing, damaged, empty or not UTF-8."""
    measuring = Measuring(str(path))
    return _measured(measuring, enumerate(Lines(path, measuring.repairs)))


def measure_corpus(corpus: Corpus, progress: ProgressBar = silent) -> Facts:
    """The facts of a corpus. Raises: DataError where it cannot be read to the end, as `read_corpus`, or is empty."""
    measuring = Measuring(name_of(corpus))
    pairs = read_corpus(corpus, measuring.repairs)
    return _measured(measuring, progress(pairs, f"reading {measuring.name}", None))


def _measured(measuring: Measuring, rows: Iterable[Sequence[Any]]) -> Facts:
    for _ in measuring.through(rows):
        pass
    return measuring.facts
