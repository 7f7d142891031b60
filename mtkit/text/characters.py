"""Control and invisible characters, which would become byte pieces of source text.

Signs that text was damaged or processed before: HTML entities, wrong decoding, control characters, subword marks.

Normalisation of source text, in the way of the model that normalised the training text.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import sentencepiece

SPACES: Final = "\t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029"
"""Characters that separate words or lines; each becomes a space. This and the next are parts of a character class."""

DROPPED: Final = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"  # controls
    "\u00ad\u200b\u2060-\u2064\ufeff\ufff9-\ufffb"  # soft hyphen, zero-width space, word joiner, byte order mark
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks of direction
)
"""Characters that have no shape and no width, the two joiners aside."""

_JOINING = (
    "\u0600-\u08ff\u0900-\u0dff\u1000-\u109f\u1780-\u17ff\u1800-\u18af"  # Arabic to Sinhala, Burmese, Khmer, Mongolian
    "\u2190-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff"  # emoji
)
"""Characters of the scripts that are spelt with joiners, as Persian and Sinhala, and emoji, which joiners combine."""

_INVISIBLE = re.compile(
    rf"([{SPACES}])|[{DROPPED}]|(?<![{_JOINING}])[\u200c\u200d]|[\u200c\u200d](?![^\s{SPACES}{DROPPED}])"
)


def each_visible() -> dict[str, str]:
    """Return the replacement by `visible` of each single character, a space or nothing, except for the joiners."""
    return {
        each: visible(each) for each in map(chr, range(0x10000)) if has_invisible(each) and each not in "\u200c\u200d"
    }


def visible(text: str) -> str:
    """Return the text without control and invisible characters; tabs and ends of lines or pages become spaces.

    A zero-width joiner or non-joiner stays within a word of a script that is spelt with them, and within emoji.
    """
    return _INVISIBLE.sub(lambda found: " " if found[1] else "", text)


def has_invisible(text: str) -> bool:
    """Return whether `visible` changes the text."""
    return not (text.isascii() and text.isprintable()) and _INVISIBLE.search(text) is not None


_BYTE = "\x80-\xbf€‚ƒ„†‡ˆ‰Š‹ŒŽ‘•˜™š›œžŸ"
"""Bytes 0x80 to 0xBF as Latin-1 and Windows-1252 decode them, without ’ “ ” … – —, which follow letters in text."""

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_DECODED = re.compile(
    f"[ÂÃ][{_BYTE}]|â(?:€[{_BYTE}’“”…–—]|\x80[\x80-\xbf])|(?:[ÄÅÎÏÐÑ×Ø][{_BYTE}]){{2}}|à[¸¹º][{_BYTE}]"
    f"|(?:[à-ï][{_BYTE}]{{2}}){{2}}|ï»¿|ðŸ|\ufffd"
)
_JOINT = re.compile(r"(?<=[^\s@])@@(?= |\n|$)")

ODDITIES: dict[str, Callable[[str], bool]] = {
    "entities": lambda text: "&" in text and _ENTITY.search(text) is not None,
    "wrongly_decoded": lambda text: not text.isascii() and _DECODED.search(text) is not None,
    "invisible": has_invisible,
    "subword_marks": lambda text: "@@" in text and _JOINT.search(text) is not None,
}
"""For each kind of oddity, whether text has it: one line, or several with "\\n" between them."""


_SIMPLE = (range(0x500), range(0x2010, 0x2028))
"""Characters of Latin, Greek and Cyrillic text, and its dashes and quotes.

Rules of folding join a character with a combining one that follows, or rewrite it alone: where each character of these
is kept and none is a combining one, the text of them is kept.
"""


class Folding:
    """Normalises source text before it is cut into pieces.

    Control and invisible characters are dropped or become spaces (`mtkit.text.characters`). Then a sentencepiece
    model that only normalises writes full-width characters, ligatures and their like as others that stand for them.
    """

    def __init__(self, rule: str | bytes) -> None:
        """A rule by its name, as nfkc, or a model. Raises: RuntimeError or ValueError where it is neither."""
        given = {"rule_name": rule} if isinstance(rule, str) else {"model_proto": rule}
        self._normalizer = sentencepiece.SentencePieceNormalizer(
            **given, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
        )
        simple = [chr(each) for some in _SIMPLE for each in some if not unicodedata.combining(chr(each))]
        kept = [each for each in simple if each == self(each)]
        self._keeps_ascii = {chr(each) for each in range(32, 127)} <= {*kept}
        self._others = re.compile(f"[^{re.escape(''.join(kept))}]")

    @property
    def model(self) -> bytes:
        """What another `Folding` is made of."""
        proto: bytes = self._normalizer.serialized_model_proto()
        return proto

    @property
    def whole_model(self) -> bytes:
        """A sentencepiece model that does all of it for other programs, U+0000 and joiners aside; made in seconds."""
        return _with_invisible(self.model)

    def __call__(self, text: str) -> str:
        folded: str = self._normalizer.normalize(visible(text))
        return folded

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Many texts, in less time than one by one."""
        doubtful = [
            not (self._keeps_ascii and text.isascii() and text.isprintable()) and self._others.search(text)
            for text in texts
        ]
        others = [visible(text) for text, each in zip(texts, doubtful, strict=True) if each]
        rest = iter(self._normalizer.normalize(others))
        return [next(rest) if each else text for text, each in zip(texts, doubtful, strict=True)]


@cache
def _with_invisible(content: bytes) -> bytes:
    """The model with rules for control and invisible characters too."""
    rules = dict(sentencepiece.SentencePieceNormalizer(model_proto=content).Decompile()) | each_visible()
    del rules["\0"]  # it would end the key
    sentencepiece.set_min_log_level(2)  # it reports the size of the map
    made: bytes = sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items())).serialized_model_proto()
    return made
