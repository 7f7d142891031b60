"""Control and invisible characters, which would become byte pieces of source text."""

import re
from typing import Final

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
