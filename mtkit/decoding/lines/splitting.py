"""Splitting of text that is longer than a model has learned to translate at once, or than its limit."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from mtkit.text.languages import known_language
from mtkit.text.sentences import sentences

Count = Callable[[Sequence[str]], list[int]]
"""The pieces of each text."""

CLOSING = r"[\"')\]}»”’」』）]*+"
BOUNDARIES = (
    re.compile(rf"(?<![.!?…])[.!?…]++{CLOSING}\s+|[。！？]+{CLOSING}\s*"),  # possible ends of sentences
    re.compile(rf"(?<![,;:،؛])[,;:،؛]++{CLOSING}\s+|\s[–—-]\s+|[，、､；：]\s*"),  # clauses
    re.compile(r"\s+"),
)
"""Places to split a text that is too long, best first; each match belongs to the text before it.

A run of marks is tried once, as a whole: one of 100,000 would otherwise take minutes.
"""


def split_sentences(text: str, language: str | None, count: Count, *, most: int | None, pieces: int) -> list[str]:
    """Split a text that is longer than usual into parts of usual length, with as many sentences as fit, in order.

    A text is longer than usual if it has more than `most` sentences (None: unknown) or more than `pieces` pieces. One
    training line in twenty has `most` sentences or more, so that the model has learned to translate all of them; one
    training line in a hundred has `pieces` pieces or more. A text is split only at ends of sentences; a single sentence
    of any length stays whole. A model trained on single sentences translates only one of several sentences.

    In Thai and Lao a space may end a sentence or separate words, so only the number of pieces counts.
    """
    units = sentences(text, language)
    if known_language(language) in ("th", "lo"):
        units, most = _units(text, BOUNDARIES[-1]), None
    few = most is None or len(units) <= most
    if len(units) < 2 or (few and count([text])[0] <= pieces):
        return [text]
    return [part.strip() for part in _grouped(units, pieces, count, most)]


def split_to_fit(text: str, longest: int, count: Count, language: str | None = None) -> list[str]:
    """Return the text in parts of at most `longest` pieces, in order, without blank ones.

    It is split at ends of sentences, then at ends of clauses, at spaces, and finally between characters, as far as
    necessary. A single character with too many pieces is a part.
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
    # a group may still be too long: a single unit may be, and pieces may differ at the seams
    return [part for group in groups for part in _split(group, longest, count, level + 1)]


def _units(text: str, boundary: re.Pattern[str]) -> list[str]:
    """Return the text between one boundary and the next, boundaries included."""
    cuts = [0, *(match.end() for match in boundary.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


def _grouped(units: list[str], longest: int, count: Count, most: int | None = None) -> list[str]:
    """Groups of at most `most` neighbouring units with a total of at most `longest` pieces."""
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
