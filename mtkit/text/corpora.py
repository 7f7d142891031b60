"""A corpus as a stream of segment pairs, from any kind of file; its documents and facts."""

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from mtkit.errors import DataError, shown
from mtkit.recipe.data import Corpus
from mtkit.terminal import ProgressBar, silent
from mtkit.text.characters import ODDITIES, is_blank
from mtkit.text.misaligned import first_suspicious
from mtkit.text.tables import Rows, dataset_rows, jsonl_rows, parquet_rows, tsv_rows
from mtkit.text.text_files import Lines, Repairs, count_lines, find_span
from mtkit.text.tmx import tmx_rows

EMPTY_LINES = "empty-lines"
"""Value of a corpus's `documents`: lines that are empty on both sides end documents."""


class SegmentPair(NamedTuple):
    """A segment and its translation, each one line of text."""

    line: int
    """Line of the input, from 1; in Parquet files and data sets the row, from 1."""
    source: str
    target: str
    document: str | int | None = None
    """Document id; None if the corpus has no documents. A new document begins when the id changes."""


def read_corpus(corpus: Corpus, repairs: Repairs | None = None, *, rows: range | None = None) -> Iterator[SegmentPair]:
    """Yield the segment pairs of a corpus in order, as a stream, read again by each call.

    Repairs are counted in `repairs`. Pairs with an empty side are pairs like all others. `rows` selects pairs, counted
    from 0; of plain text without documents that empty lines end, the lines before them are skipped undecoded.

    Raises: DataError, while reading, if something is missing, damaged or no text, or if the two sides (or the document
    ids) differ in their number of lines.
    """
    repairs = repairs or Repairs()
    by_gaps = corpus.documents == EMPTY_LINES
    if rows is not None and not by_gaps and plain_files(corpus) is not None:
        return _parallel_pairs(corpus, repairs, rows)
    pairs = _parallel_pairs(corpus, repairs) if _table(corpus) is None else _table_pairs(corpus, repairs)
    pairs = number_documents(pairs) if by_gaps else pairs
    return pairs if rows is None else islice(pairs, rows.start, rows.stop)


def number_documents(pairs: Iterable[SegmentPair]) -> Iterator[SegmentPair]:
    """Number documents from 1: a pair with both sides empty is the last of its document, and stays in the stream."""
    document = 1
    for line, source, target, _ in pairs:
        yield SegmentPair(line, source, target, document)
        document += is_blank(source) and is_blank(target)


def plain_files(corpus: Corpus) -> list[Path] | None:
    """Return a corpus's text files if reading may begin in their middle and gives all lines.

    None for tables, .gz files, pipes, and corpora whose pairs are left out by score.
    """
    if _table(corpus) is not None or corpus.scores is not None:
        return None
    paths = paths_of(corpus)
    return paths if all(path.suffix != ".gz" and os.path.isfile(path) for path in paths) else None


def line_count(corpus: Corpus) -> int | None:
    """Count the segment pairs of a corpus of plain text; None for others. Raises: DataError if its files differ."""
    paths = plain_files(corpus)
    if paths is None:
        return None
    counts = [count_lines(path) for path in paths]
    if len(set(counts)) > 1:
        raise _unequal(paths)
    return counts[0]


def name_of(corpus: Corpus, side: Literal["source", "target"] | None = None) -> str:
    """Return the name of a corpus, or of one side of it, for messages: the file, and the column of a table."""
    names = {"source": corpus.source, "target": corpus.target}
    table = _table(corpus)
    if table is None:
        return str(names[side]) if side else f"{corpus.source} and {corpus.target}"
    return f"{table}, column {names[side]}" if side else table


def _table(corpus: Corpus) -> str | None:
    """Return the name of the file or data set that holds both sides; None for two files."""
    if corpus.dataset is not None:
        return " ".join(str(part) for part in (corpus.dataset, corpus.subset, corpus.split) if part)
    return None if corpus.file is None else str(corpus.file)


def paths_of(corpus: Corpus) -> list[Path]:
    """Return the text files of a corpus of two files, and the files with document ids and scores if there are any."""
    documents = None if corpus.documents == EMPTY_LINES else corpus.documents
    return [Path(str(path)) for path in (corpus.source, corpus.target, documents, corpus.scores) if path is not None]


def _parallel_pairs(corpus: Corpus, repairs: Repairs, rows: range | None = None) -> Iterator[SegmentPair]:
    paths = paths_of(corpus)
    spans = [None if rows is None else find_span(path, rows.start, rows.stop) for path in paths]
    lines = [Lines(path, repairs, span) for path, span in zip(paths, spans, strict=True)]
    try:
        numbered = enumerate(zip(*lines, strict=True), start=1 if rows is None else rows.start + 1)
        for number, texts in _well_scored(numbered, corpus, repairs):
            yield SegmentPair(number, *texts)
    except ValueError as error:
        raise _unequal(paths) from error


def _table_pairs(corpus: Corpus, repairs: Repairs) -> Iterator[SegmentPair]:
    for line, cells in _well_scored(_table_rows(corpus, repairs), corpus, repairs):
        source, target = cells[:2]
        if not isinstance(source, str) or not isinstance(target, str):
            side: Literal["source", "target"] = "target" if isinstance(source, str) else "source"
            raise DataError(f"{name_of(corpus, side)}, line {line}: a number, not text")
        yield SegmentPair(line, source, target, *cells[2:])


_Cells = TypeVar("_Cells", bound=Sequence[Any])


def _well_scored(
    rows: Iterable[tuple[int, _Cells]], corpus: Corpus, repairs: Repairs
) -> Iterator[tuple[int, _Cells | Sequence[Any]]]:
    """Yield the rows without their last cell, the score, if it is high enough; the same rows of an unscored corpus.

    Blank rows are kept, as they end documents. Raises: DataError for a score that is not a number.
    """
    if corpus.least_score is None:
        yield from rows
        return
    for line, (*cells, cell) in rows:
        try:
            score = float(cell)
        except (TypeError, ValueError, OverflowError):  # an integer may be too large for a float
            score = math.nan
        blank = not any(str(cell).strip() for cell in cells[:2])
        if not blank and math.isnan(score):
            name = corpus.scores if _table(corpus) is None else f"{_table(corpus)}, column {corpus.scores}"
            raise DataError(f"{name}, line {line}: {shown(str(cell)[:40])} is not a score; give a number per line")
        if blank or score >= corpus.least_score:
            yield line, cells
        else:
            repairs.low_scores += 1


def _table_rows(corpus: Corpus, repairs: Repairs) -> Rows:
    """Read source and target, and the document id and the score if columns hold them."""
    gaps = corpus.documents == EMPTY_LINES
    names = (corpus.source, corpus.target, None if gaps else corpus.documents, corpus.scores)
    columns = [str(column) for column in names if column is not None]
    if corpus.file is None:
        split, streaming = corpus.split, corpus.streaming
        return dataset_rows(str(corpus.dataset), corpus.subset, split, columns, repairs, streaming=streaming)
    kind = Path(corpus.file.name.removesuffix(".gz")).suffix
    if kind == ".tsv":
        return tsv_rows(corpus.file, columns, repairs, gaps=gaps)
    if kind == ".jsonl":
        return jsonl_rows(corpus.file, columns, repairs, gaps=gaps)
    if corpus.file.suffix == ".parquet":
        return parquet_rows(corpus.file, columns, repairs)
    for name in ("documents", "scores"):
        if kind == ".tmx" and getattr(corpus, name) is not None:
            raise DataError(f"{corpus.file}: a translation memory has no {name}; leave {name} of the corpus out")
    if kind == ".tmx":
        return tmx_rows(corpus.file, columns, repairs)
    excel = "save it as CSV UTF-8, and then " if kind == ".xlsx" else ""
    remedy = f"; {excel}convert it with the command in docs/corpora.md" if kind in (".csv", ".xlsx") else ""
    raise DataError(
        f"{corpus.file} has an unknown format; give .tsv, .jsonl, .tmx (each with .gz too) or .parquet{remedy}"
    )


def _unequal(paths: list[Path]) -> DataError:
    """Return the error about files of one corpus that differ in their number of lines."""
    counts = [sum(1 for _ in Lines(path)) for path in paths]
    source, target, *others = paths
    if counts[0] != counts[1]:
        line = first_suspicious(zip(Lines(source), Lines(target), strict=False))
        hint = f"they seem to part at about line {line:,}" if line else "no line looks like the first that is off"
        return DataError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; {hint}; "
            f"line N of one must translate line N of the other, so give two files that belong together"
        )
    for path, count in zip(others, counts[2:], strict=True):
        if count != counts[0]:
            return DataError(
                f"{path} has {count:,} lines and {source} has {counts[0]:,}; "
                f"line N of the first must be the id of the document, or the score, of line N of the other"
            )
    return DataError(f"{source} or {target} changed while it was read; run the command again")


_Row = TypeVar("_Row", bound=Sequence[Any])

_MEASURED_ROWS = 1_000
"""Rows that are measured together."""

_HASHED_ROWS = 10_000
"""Rows, a multiple of `_MEASURED_ROWS`, after which their document ids are hashed."""


@dataclass(frozen=True)
class Facts:
    """Counts, repairs and fingerprint of a corpus or a text file."""

    name: str
    """Name for messages."""
    lines: int
    """Segment pairs, or lines of the one file."""
    bytes: int
    """Bytes of the text in UTF-8 of both sides, plus one for each line end."""
    sha256: str
    """Hexadecimal hash of the text and the documents: the same for text files, gzipped or not, and columns, and
    whatever was repaired."""
    carriage_returns: int
    """This and the next two: see `Repairs`."""
    byte_order_marks: int
    inner_newlines: int
    line_separators: int
    """Characters U+2028 and U+2029, which look like line ends and stay in the text."""
    low_scores: int = 0
    """Pairs left out because their score is below `least_score`."""
    inner_carriage_returns: int = 0
    """Carriage returns within a line, which stay in the text; old Macintosh files end lines with them."""
    oddities: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """For each kind of `ODDITIES` in the text, by side: the number of lines that have it, and the first of them."""


class Measuring:
    """Measures rows while they are read: each a line number, one or two texts, and perhaps a document id."""

    def __init__(self, name: str) -> None:
        """`name` is for messages. The reader of the rows counts its `repairs`."""
        self.name, self.repairs = name, Repairs()
        self.lines = 0
        """Rows so far."""
        self._digest = hashlib.sha256()
        self._documents: list[str] = []
        self._bytes = self._returns = self._separators = 0
        self._oddities: dict[str, dict[str, list[int]]] = {}

    def through(self, rows: Iterable[_Row]) -> Iterator[_Row]:
        """Yield the same rows; they are measured some time before they are yielded."""
        rows = iter(rows)
        while chunk := list(islice(rows, _MEASURED_ROWS)):
            self._add(chunk)
            yield from chunk

    def _add(self, rows: Sequence[Sequence[Any]]) -> None:
        # no field has a newline, so different rows give different text
        text = "\n".join([field for row in rows for field in row[1:3]]) + "\n"
        encoded = text.encode()
        self._digest.update(encoded)
        self._documents += [f"{document}\n" for row in rows for document in row[3:] if document is not None]
        self.lines += len(rows)
        if self.lines % _HASHED_ROWS == 0:
            self._digest.update("".join(self._documents).encode())
            self._documents.clear()
        self._bytes += len(encoded)
        self._returns += text.count("\r")
        self._separators += text.count("\u2028") + text.count("\u2029")
        for kind, has in ODDITIES.items():
            if not has(text.replace("\n", " ") if kind == "invisible" else text):
                continue
            for place, side in enumerate(("source", "target"), start=1):
                numbers = [row[0] for row in rows if place < len(row) and has(row[place])]
                if numbers:
                    counts = self._oddities.setdefault(kind, {}).setdefault(side, [0, numbers[0]])
                    counts[0] += len(numbers)

    def check(self) -> None:
        """Raises: DataError if there was no row."""
        if self.lines == 0:
            raise DataError(f"{self.name} is empty; give text with one segment per line")

    @property
    def facts(self) -> Facts:
        """The facts of all rows so far. Raises: DataError if there was none."""
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
    """Measure one text file. Raises: DataError if it is missing, damaged, empty or not UTF-8."""
    measuring = Measuring(str(path))
    deque(measuring.through(enumerate(Lines(path, measuring.repairs))), maxlen=0)
    return measuring.facts


def measure_corpus(corpus: Corpus, progress: ProgressBar = silent) -> Facts:
    """Measure a corpus. Raises: DataError if it cannot be read to the end, as `read_corpus`, or is empty."""
    measuring = Measuring(name_of(corpus))
    pairs = read_corpus(corpus, measuring.repairs)
    deque(measuring.through(progress(pairs, f"reading {measuring.name}", None)), maxlen=0)
    return measuring.facts
