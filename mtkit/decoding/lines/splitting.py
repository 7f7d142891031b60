"""Cutting text that is too long for the model where it hurts least."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

Count = Callable[[Sequence[str]], list[int]]
"""The pieces of each text."""

CLOSING = r"[\"')\]}»”’」』）]*"
BOUNDARIES = (
    re.compile(rf"[.!?…]+{CLOSING}\s+|[。！？]+{CLOSING}\s*"),  # sentence ends
    re.compile(rf"[,;:]+{CLOSING}\s+|\s[–—-]\s+|[，、；：]\s*"),  # clauses
    re.compile(r"\s+"),
)
"""Where to cut, best first; each match belongs to the text before it."""


def split(text: str, longest: int, count: Count) -> list[str]:
    """The text in parts of at most `longest` pieces, in order, blank ones left out.

    Cut at sentence ends, where a sentence is too long at its clauses, then at spaces, and at last between any two
    characters. A single character that has too many pieces is a part of its own.
    """
    return [part for part in _split(text, longest, count, level=0) if part]


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


def _grouped(units: list[str], longest: int, count: Count) -> list[str]:
    """Neighbouring units joined as long as their pieces add up to at most `longest`."""
    groups: list[str] = []
    size = longest + 1
    for unit, pieces in zip(units, count(units), strict=True):
        if size + pieces <= longest:
            groups[-1] += unit
            size += pieces
        else:
            groups.append(unit)
            size = pieces
    return groups
