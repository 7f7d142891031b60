"""Words of a text, and the pieces that spell them.

Words are separated by white space, as in Python's str.split. In scripts that put no space between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) every character is a word, together with its combining marks and with invisible
characters around it, such as U+200B.
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

_CHARACTERS = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSPACED)
_MARKS = "".join(
    chr(code)
    for first, last in (*_UNSPACED, (0x0300, 0x036F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
    if last - first < 0x400  # not the ideographs, which have none
    for code in range(first, last + 1)
    if category(chr(code)).startswith("M")
)
_VOICED = "\uff9e\uff9f"  # the half-width marks, which are letters by their category
_INVISIBLE = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
"""Soft hyphens, joiners, marks of direction and other characters of category Cf."""
_WORD = re.compile(rf"[{_INVISIBLE}]*+[{_CHARACTERS}][{_MARKS}{_VOICED}{_INVISIBLE}]*+|[^\s{_CHARACTERS}]++")
_UNSPACED_TEXT = re.compile(rf"[{_CHARACTERS}{_MARKS}{_VOICED}{_INVISIBLE}]+")
_STRETCH = re.compile(r"\s++|\S++")

_SPACES = str.maketrans("", "", " \u2581")
"""Deletes spaces as sentencepiece writes them."""


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return _WORD.findall(text)


def is_unspaced(text: str) -> bool:
    """Return whether all characters belong to scripts without spaces between words; False for an empty text."""
    return _UNSPACED_TEXT.fullmatch(text) is not None


def word_starts(text: str) -> list[int]:
    """The index of each word's first character."""
    return [match.start() for match in _WORD.finditer(text)]


def word_shares(tokenizer: Tokenizer, pieces: Sequence[int], text: str, *, normalised: bool) -> np.ndarray:
    """The share of each piece's bytes in each word of the text: (pieces, words) float64.

    Tags, breaks, the end mark and spaces spell nothing. `normalised`: the pieces come from the text, as the tokenizer
    normalises it; otherwise the text comes from the pieces, and unknown ones spell nothing.
    """
    spans = _spans(text, tokenizer.normal if normalised else str)
    sizes = tokenizer.bytes[np.asarray(pieces, dtype=np.int64)].astype(np.float64)
    starts = tokenizer.space_bytes(np.asarray(pieces))
    sizes[(starts[:, None] + np.arange(3)).ravel()] = 0  # the bytes of a space
    if normalised and UNK in pieces:
        sizes[np.asarray(pieces) == UNK] = _unknown_sizes(tokenizer, pieces, text)
    ends = np.cumsum(sizes)
    overlap = np.minimum(ends[:, None], spans[:, 1]) - np.maximum((ends - sizes)[:, None], spans[:, 0])
    return overlap.clip(min=0) / np.maximum(sizes, 1e-9)[:, None]


def _spans(text: str, normal: Callable[[str], str]) -> np.ndarray:
    """First byte and end of each word (words, 2), in the normalised text without spaces.

    If normalisation changes the length of a stretch of several words, as for half-width kana, words keep their share.
    """
    spans, position = [], 0
    for match in _STRETCH.finditer(text):
        size = _bytes(normal(match[0]))
        sizes = [_bytes(word) for word in words(match[0])]
        scale, start = size / max(sum(sizes), 1), 0
        for word_size in sizes:
            spans.append((position + start * scale, position + (start + word_size) * scale))
            start += word_size
        position += size
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _unknown_sizes(tokenizer: Tokenizer, pieces: Sequence[int], text: str) -> list[int]:
    """The bytes of each unknown piece: the text up to the known pieces that follow it."""
    known = [""]  # the known pieces before the first unknown one, and after each
    for piece in pieces:
        if piece == UNK:
            known.append("")
        elif tokenizer.bytes[piece]:
            known[-1] += tokenizer.piece(piece).translate(_SPACES)
    spelt, position, sizes = tokenizer.normal(text).translate(_SPACES), len(known[0]), []
    for run in known[1:]:
        at = spelt.find(run, position + 1) if run else len(spelt)
        sizes.append(len(spelt[position:at].encode()) if at >= 0 else 0)
        position = (at if at >= 0 else position) + len(run)
    return sizes


def _bytes(text: str) -> int:
    """The number of bytes without sentencepiece's spaces."""
    return len(text.translate(_SPACES).encode())
