"""Words of a text, and which pieces spell them.

Words are separated by white space, as in Python's str.split. In scripts that put no space between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) every character is a word, together with the marks that combine with it and the
characters without a shape around it, such as U+200B.
"""

import re
from collections.abc import Callable, Sequence
from unicodedata import category

import numpy as np

from mtkit.text.tokenizer import UNK, Tokenizer

_UNSPACED = (
    (0x2E80, 0x2FDF),  # radicals
    (0x3001, 0x30FF),  # punctuation, kana
    (0x3100, 0x312F),  # Bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),  # ideographs
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
    (0xFF01, 0xFF0F),  # full-width punctuation, without letters and digits
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF9F),  # and half-width kana
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
)
"""First and last character of the ranges in which each character is a word."""

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSPACED)
_MARKS = "".join(
    chr(code)
    for first, last in (*_UNSPACED, (0x0300, 0x036F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
    if last - first < 0x400  # not the ideographs, which have none
    for code in range(first, last + 1)
    if category(chr(code)).startswith("M")
)
_VOICED = "\uff9e\uff9f"  # the half-width marks, which are letters by their category
_SHAPELESS = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
"""Soft hyphens, joiners, marks of direction and their like, of category Cf."""
_WORD = re.compile(rf"[{_SHAPELESS}]*+[{_ALONE}][{_MARKS}{_VOICED}{_SHAPELESS}]*+|[^\s{_ALONE}]++")
_STRETCH = re.compile(r"\s++|\S++")

_SPACES = str.maketrans("", "", " \u2581")
"""Takes out what sentencepiece writes as a space."""


def words(text: str) -> list[str]:
    """The words of a text, in order; their numbers, from 0, are those of the links."""
    return _WORD.findall(text)


def begins(text: str) -> list[int]:
    """Where each word of a text begins, in characters."""
    return [match.start() for match in _WORD.finditer(text)]


def shares(tokenizer: Tokenizer, pieces: Sequence[int], text: str, *, normalised: bool) -> np.ndarray:
    """Which share of each piece spells which word of the text, counted in bytes: (pieces, words) float64.

    Tags, breaks, the end mark and spaces spell nothing. `normalised`: the pieces come from the text, as the tokenizer
    normalises it; otherwise the text comes from the pieces, and unknown ones spell nothing.
    """
    spans = _spans(text, tokenizer.normal if normalised else str)
    sizes = tokenizer.bytes[np.asarray(pieces, dtype=np.int64)].astype(np.float64)
    if normalised and UNK in pieces:
        sizes[np.asarray(pieces) == UNK] = _unknown(tokenizer, pieces, text)
    after = np.cumsum(sizes)
    before = after - sizes
    inside = np.minimum(after[:, None], spans[:, 1]) - np.maximum(before[:, None], spans[:, 0])
    return inside.clip(min=0) / np.maximum(sizes, 1e-9)[:, None]


def _spans(text: str, normal: Callable[[str], str]) -> np.ndarray:
    """First byte and end of each word (words, 2), of the text as it is normalised, without spaces.

    Within a stretch of several words that changes its length, as one of half-width kana does, words keep their share.
    """
    spans, position = [], 0
    for match in _STRETCH.finditer(text):
        stretch = match[0]
        size = _size(normal(stretch))
        sizes = [_size(word) for word in words(stretch)]
        scale, within = size / max(sum(sizes), 1), 0
        for each in sizes:
            spans.append((position + within * scale, position + (within + each) * scale))
            within += each
        position += size
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _unknown(tokenizer: Tokenizer, pieces: Sequence[int], text: str) -> list[int]:
    """The bytes of each unknown piece: those up to where the known pieces behind it, to the next unknown, stand."""
    runs = [""]
    for piece in pieces:
        if piece == UNK:
            runs.append("")
        elif tokenizer.bytes[piece]:
            runs[-1] += tokenizer.piece(piece).translate(_SPACES)
    spelt, position, sizes = tokenizer.normal(text).translate(_SPACES), len(runs[0]), []
    for run in runs[1:]:
        at = spelt.find(run, position + 1) if run else len(spelt)
        sizes.append(len(spelt[position:at].encode()) if at >= 0 else 0)
        position = (at if at >= 0 else position) + len(run)
    return sizes


def _size(text: str) -> int:
    """Its bytes without what sentencepiece writes as a space."""
    return len(text.translate(_SPACES).encode())
