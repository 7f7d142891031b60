"""Segment pairs, and the documents that they belong to."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
