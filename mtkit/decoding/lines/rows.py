"""Texts that belong together line by line, such as sources with document ids: read as rows."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from mtkit.errors import DataError
from mtkit.storage.jobs import Item
from mtkit.text.characters import is_blank
from mtkit.text.text_files import Lines, Span, checked_lines

Text = Path | Iterable[str]
"""Lines: a file, .gz too, or an iterable of lines; line ends are removed."""


def source_items(source: Text, span: Span | None, ids: Text | None, prefixes: Text | None) -> Iterable[Item]:
    """Return the lines of the source, each with its document id or its prefix if there are any.

    Raises: DataError as `rows_of`, and for a line of an iterable that is not text.
    """
    if ids is not None:
        return rows_of([source, ids], [unequal_ids(ids)])
    if prefixes is not None:
        unequal = f"{name_of(prefixes, 'the prefixes')} must have as many lines as the input, which may be empty"
        return rows_of([source, prefixes], [unequal])
    return zip(_lines(source, span))


def unequal_ids(ids: Text) -> str:
    """Return the message on ids that are more or fewer than the lines."""
    return f"{name_of(ids, 'the ids')} must have as many lines as the input, a document id each"


def rows_of(texts: Sequence[Text], messages: Sequence[str]) -> Iterator[Item]:
    """Yield the lines of all texts, row by row.

    Raises: DataError for a text with more or fewer lines than the first, with its message (the first has none); at once
    if both numbers are known.
    """
    counts = [_line_count(text) for text in texts]
    for count, message in zip(counts[1:], messages, strict=True):
        if None not in (counts[0], count) and counts[0] != count:
            raise DataError(f"{message} ({counts[0]:,} and {count:,} lines)")

    def rows() -> Iterator[Item]:
        for row in zip_longest(*map(_lines, texts)):
            if None in row:
                ended = [line is None for line in row[1:]]
                raise DataError(messages[ended.index(row[0] is not None)])
            yield row

    return rows()


def _line_count(text: Text) -> int | None:
    """Return the number of lines, if they can be read more than once."""
    if isinstance(text, Path):
        return sum(1 for _ in _lines(text)) if os.path.isfile(text) else None
    return len(text) if isinstance(text, Sequence) else None


def not_blank(one: Item, other: Item) -> bool:
    """Return whether neither of two lines is blank, so that they belong to one document."""
    return not is_blank(one[0]) and not is_blank(other[0])


def same_last(one: Item, other: Item) -> bool:
    """Return whether two lines have the same document id, which is their last string."""
    return one[-1] == other[-1]


def _lines(text: Text, span: Span | None = None) -> Iterable[str]:
    return Lines(text, span=span) if isinstance(text, Path) else checked_lines(text)


def name_of(text: Text, otherwise: str) -> str:
    """Return the path of a file, or another name of lines that are no file."""
    return str(text) if isinstance(text, Path) else otherwise
