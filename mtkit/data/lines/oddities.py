"""Signs that text was damaged or processed before: HTML entities, wrong decoding, control characters, subword marks."""

import re
from collections.abc import Callable

from mtkit.data.lines.invisible import has_invisible

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
