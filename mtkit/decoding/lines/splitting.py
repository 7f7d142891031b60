"""Cutting text that holds more than a model has learned to translate at once, or more than it takes."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from mtkit.data.lines.sentences import sentences

Count = Callable[[Sequence[str]], list[int]]
"""The pieces of each text."""

CLOSING = r"[\"')\]}»”’」』）]*"
BOUNDARIES = (
    re.compile(rf"[.!?…]+{CLOSING}\s+|[。！？]+{CLOSING}\s*"),  # what may be the end of a sentence
    re.compile(rf"[,;:]+{CLOSING}\s+|\s[–—-]\s+|[，、；：]\s*"),  # clauses
    re.compile(r"\s+"),
)
"""Where to cut what is longer than a sentence, best first; each match belongs to the text before it."""


def parted(text: str, language: str | None, count: Count, *, most: int | None, pieces: int) -> list[str]:
    """The text, or where it holds more than is usual, its sentences in as few parts as hold no more, in order.

    More than is usual is more than `most` sentences: as many as, or more than, one training line in twenty has, so that
    a model has seen that all of them are to be translated (None: nobody has counted). And it is more than `pieces`
    pieces: what one training line in a hundred has. It is cut only where a sentence ends, so a sentence by itself is
    never cut, however long. A model that was trained on single sentences translates one sentence of several, and loses
    the others.
    """
    units = sentences(text, language)
    few = most is None or len(units) <= most
    if len(units) < 2 or (few and count([text])[0] <= pieces):
        return [text]
    return [part.strip() for part in _grouped(units, pieces, count, most)]


def split(text: str, longest: int, count: Count, language: str | None = None) -> list[str]:
    """The text in parts of at most `longest` pieces, in order, blank ones left out.

    Cut at sentence ends, where a sentence is too long at its clauses, then at spaces, and at last between any two
    characters. A single character that has too many pieces is a part of its own.
    """
    text = text.strip()
    if count([text])[0] <= longest:
        return [text] if text else []
    groups = _grouped(sentences(text, language), longest, count)
    return [part for group in groups for part in _split(group, longest, count, level=0) if part]


def _split(text: str, longest: int, count: Count, level: int) -> list[str]:
    text = text.strip()
    if len(text) <= 1 or count([text])[0] <= longest:
        return [text]
    if level == len(BOUNDARIES):
        middle = len(text) // 2
        halves = (text[:middle], text[middle:])
        return [part for half in halves for part in _split(half, longest, count, level)]
    groups = _grouped(_units(text, BOUNDARIES[level]), longest, count)
    # a group may still be too long: a unit that is so by itself, or pieces that differ at the seams
    return [part for group in groups for part in _split(group, longest, count, level + 1)]


def _units(text: str, boundary: re.Pattern[str]) -> list[str]:
    """The text between one boundary and the next, boundaries included."""
    cuts = [0, *(match.end() for match in boundary.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


def _grouped(units: list[str], longest: int, count: Count, most: int | None = None) -> list[str]:
    """Neighbouring units joined, `most` at most, as long as their pieces add up to at most `longest`."""
    groups: list[str] = []
    size, joined = longest + 1, 0
    for unit, pieces in zip(units, count(units), strict=True):
        if size + pieces <= longest and (most is None or joined < most):
            groups[-1] += unit
            size, joined = size + pieces, joined + 1
        else:
            groups.append(unit)
            size, joined = pieces, 1
    return groups
