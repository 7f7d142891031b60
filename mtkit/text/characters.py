"""Characters that text should not have, and the normalisation of source text.

Control and invisible characters would become byte pieces. HTML entities, wrong decoding, control characters and subword
marks show that text was damaged or processed.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import sentencepiece

SPACES: Final = "\t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029"
"""Characters that separate words or lines; each becomes a space. Like `DROPPED`, part of a character class."""

DROPPED: Final = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"  # controls
    "\u00ad\u200b\u2060-\u2064\ufeff\ufff9-\ufffb"  # soft hyphen, zero-width space, word joiner, byte order mark
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks of direction
)
"""Characters without shape and width, except the two joiners."""

_JOINING = (
    "\u0600-\u08ff\u0900-\u0dff\u1000-\u109f\u1780-\u17ff\u1800-\u18af"  # Arabic to Sinhala, Burmese, Khmer, Mongolian
    "\u2190-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff"  # emoji
)
"""Characters of scripts that are written with joiners, as Persian and Sinhala, and emoji, which joiners combine."""

_INVISIBLE = re.compile(
    rf"([{SPACES}])|[{DROPPED}]|(?<![{_JOINING}])[\u200c\u200d]|[\u200c\u200d](?![^\s{SPACES}{DROPPED}])"
)


def visible(text: str) -> str:
    """Return the text without control and invisible characters; tabs, line ends and page ends become spaces.

    Zero-width joiners and non-joiners stay within words of scripts that are written with them, and within emoji.
    """
    return _INVISIBLE.sub(lambda match: " " if match[1] else "", text)


def has_invisible(text: str) -> bool:
    """Return whether `visible` changes the text."""
    return not (text.isascii() and text.isprintable()) and _INVISIBLE.search(text) is not None


UNSEEN: Final = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})
"""Unicode's categories of white space, controls and format marks, such as zero-width spaces and byte order marks."""


def is_blank(line: str) -> bool:
    """Return whether a line shows nothing: it contains only white space and invisible characters."""
    return all(unicodedata.category(character) in UNSEEN for character in line)


_BYTE = "\x80-\xbf€‚ƒ„†‡ˆ‰Š‹ŒŽ‘•˜™š›œžŸ"
"""Bytes 0x80 to 0xBF as Latin-1 and Windows-1252 decode them, without ’ “ ” … – —, which follow letters in text."""

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_DECODED = re.compile(
    f"[ÂÃ][{_BYTE}]|â(?:€[{_BYTE}’“”…–—]|\x80[\x80-\xbf])|(?:[ÄÅÎÏÐÑ×Ø][{_BYTE}]){{2}}|à[¸¹º][{_BYTE}]"
    f"|(?:[à-ï][{_BYTE}]{{2}}){{2}}|ï»¿|ðŸ|\ufffd"
)
_QUOTED = re.compile(r'^"[^\n]*"$', re.MULTILINE)
_DOUBLED = re.compile(r'^(?!""".*"""$)"[^"\n]*""(?:[^"\n]|"")*"$', re.MULTILINE)  # not """Docstrings."""
_JOINT = re.compile(r"(?<=[^\s@])@@(?= |\n|$)")

ODDITIES: dict[str, Callable[[str], bool]] = {
    "entities": lambda text: "&" in text and _ENTITY.search(text) is not None,
    "wrongly_decoded": lambda text: not text.isascii() and _DECODED.search(text) is not None,
    "invisible": has_invisible,
    "doubled_quotes": lambda text: '""' in text and _DOUBLED.search(text) is not None,
    "quoted": lambda text: '"' in text and _QUOTED.search(text) is not None,
    "subword_marks": lambda text: "@@" in text and _JOINT.search(text) is not None,
}
"""For each kind of oddity, a function that finds it in text: one line, or several with "\\n" between them."""


_SIMPLE = (range(0x500), range(0x2010, 0x2028))
"""Characters of Latin, Greek and Cyrillic text, and its dashes and quotes.

Folding rules rewrite single characters, or join one with a following combining character. A text of these characters
is therefore unchanged if each of them is unchanged and none is combining.
"""


class Folding:
    """Normalises source text before it is encoded, as the training text was normalised.

    Control and invisible characters are dropped or become spaces. Then a sentencepiece model that only normalises
    replaces full-width characters, ligatures and the like.
    """

    def __init__(self, rule: str | bytes) -> None:
        """`rule`: a name, as nfkc, or a model. Raises: RuntimeError or ValueError if it is neither."""
        source = {"rule_name": rule} if isinstance(rule, str) else {"model_proto": rule}
        self._normalizer = sentencepiece.SentencePieceNormalizer(
            **source, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
        )
        simple = [chr(code) for codes in _SIMPLE for code in codes if not unicodedata.combining(chr(code))]
        unchanged = [char for char in simple if char == self(char)]
        self._keeps_ascii = {chr(code) for code in range(32, 127)} <= {*unchanged}
        self._others = re.compile(f"[^{re.escape(''.join(unchanged))}]")

    @property
    def model(self) -> bytes:
        """The sentencepiece model from which another `Folding` can be made."""
        proto: bytes = self._normalizer.serialized_model_proto()
        return proto

    @property
    def whole_model(self) -> bytes:
        """A sentencepiece model that also handles invisible characters, except U+0000 and joiners; made in seconds."""
        return _add_invisible(self.model)

    def __call__(self, text: str) -> str:
        folded: str = self._normalizer.normalize(visible(text))
        return folded

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Fold many texts, in less time than one by one."""
        doubtful = [
            not (self._keeps_ascii and text.isascii() and text.isprintable()) and self._others.search(text)
            for text in texts
        ]
        rest = iter(
            self._normalizer.normalize([visible(text) for text, hit in zip(texts, doubtful, strict=True) if hit])
        )
        return [next(rest) if hit else text for text, hit in zip(texts, doubtful, strict=True)]


@cache
def _add_invisible(content: bytes) -> bytes:
    """Add rules for control and invisible characters to a model."""
    rules = dict(sentencepiece.SentencePieceNormalizer(model_proto=content).Decompile())
    characters = map(chr, range(1, 0x10000))  # U+0000 would end the key
    # a joiner is invisible only at some places
    rules |= {char: visible(char) for char in characters if has_invisible(char) and char not in "\u200c\u200d"}
    sentencepiece.set_min_log_level(2)  # it reports the size of the map
    proto: bytes = sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items())).serialized_model_proto()
    return proto
