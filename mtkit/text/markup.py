"""Inline tags of a line, taken out before translation: the text without tags, and the tree of elements.

The model reads the text, in which character references are resolved. `mtkit.text.tag_placement` puts the tags into the
translation.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
"""Elements of HTML that have no end tag."""

DEEPEST = 100
"""Maximum depth of elements whose text is translated; deeper ones stay as they are."""

_BREAKS = frozenset({"br", "hr"})
"""Elements that separate words."""

_TAG = re.compile(
    r"(?P<comment><!--)|<(?P<end>/)?(?P<name>[A-Za-z][\w:.-]*+)(?P<rest>(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*?)(?P<void>/)?>"
)
PLACEHOLDER = re.compile(r"\{\{[^{}\s]+\}\}|\$?\{[^{}\s]*\}|%(?:\(\w+\)|\d+\$)?[sdf](?![0-9A-Za-z\u00c0-\u052f])")
"""Not 100%discount; but Japanese and Korean particles follow %s without a space, and are no Latin letters."""
_LONG_NUMBER = re.compile(r"(?<=&#)[0-9]{1000,}")
_FIXED = re.compile(r"\btranslate\s*=\s*[\"']?no\b|\bnotranslate\b")


@dataclass(frozen=True)
class Token:
    """A tag, a comment, a placeholder, or a text between them."""

    raw: str
    kind: Literal["text", "start", "end", "single", "placeholder", "break"]
    """A break separates segments; `build` gets none."""
    name: str = ""
    """The name of a tag, in lower case."""
    text: str = ""
    """The part of a text that the model reads."""
    is_fixed: bool = False
    """Whether the content of a start tag's element stays as it is."""


@dataclass
class Element:
    """An element, a single tag, or a text that stays, in the text of a line."""

    opening: str
    begin: int
    """Index of the first character in the text without tags."""
    end: int = 0
    closing: str = ""
    untranslated: str | None = None
    """The source, with its tags, that replaces the translation; None: none."""
    children: "list[Element]" = field(default_factory=list)


@dataclass(frozen=True)
class Marked:
    """A line, as its text and its elements."""

    text: str
    elements: list[Element]
    is_nested: bool
    """Whether each start tag has its end tag, in legal order. Tags that do not are carried one by one."""


def parse(line: str) -> Marked:
    """Separate the tags of a line from its text, in which character references are resolved."""
    return build([*_tokens(line)])


def _tokens(line: str) -> Iterator[Token]:
    place = end = 0
    last_comment_end = line.rfind("-->")  # searched once, for lines with many <!--
    while match := _TAG.search(line, end):
        start, end = match.span()
        if match["comment"]:
            if end > last_comment_end:
                continue
            end = line.index("-->", end) + len("-->")
        yield from text_tokens(line[place:start])
        raw, name = line[start:end], (match["name"] or "").lower()
        if not name or match["void"] or (name in VOID and not match["end"]):
            yield Token(raw, "single", name)
        else:
            yield Token(raw, "end" if match["end"] else "start", name, is_fixed=bool(_FIXED.search(raw)))
        place = end
    yield from text_tokens(line[place:])


def text_tokens(raw: str) -> Iterator[Token]:
    """The texts and placeholders of a source without tags."""
    place = 0
    for match in PLACEHOLDER.finditer(raw):
        if match.start() > place:
            yield Token(raw[place : match.start()], "text", text=unescape(raw[place : match.start()]))
        yield Token(match[0], "placeholder", text=match[0])
        place = match.end()
    if place < len(raw):
        yield Token(raw[place:], "text", text=unescape(raw[place:]))


def unescape(text: str) -> str:
    """Return the text with character references resolved; `html.unescape` fails at numbers of thousands of digits."""
    return html.unescape(_LONG_NUMBER.sub(lambda number: number[0].lstrip("0")[:8] or "0", text))


def partners(tokens: Sequence[Token]) -> dict[int, int]:
    """The indices of start and end tags that belong together, in both directions; other tags have no partner.

    An end tag closes the last open element of its name. The elements in it that are still open have no end tag.
    """
    opened: list[int] = []
    names: Counter[str] = Counter()  # of the open elements, so that an end tag without a start tag searches nothing
    pairs: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if token.kind == "start":
            opened.append(index)
            names[token.name] += 1
        elif token.kind == "end" and names[token.name]:
            name = ""
            while name != token.name:
                start = opened.pop()
                name = tokens[start].name
                names[name] -= 1
            pairs |= {start: index, index: start}
    return pairs


def build(tokens: Sequence[Token]) -> Marked:
    """The text of a segment's tokens, and its elements."""
    partner_of, text, root = partners(tokens), "", Element("", 0)
    opened, is_nested, fixed = [root], True, 0
    for index, token in enumerate(tokens):
        if token.kind == "text":
            text += token.text
            continue
        if token.kind == "end" and index in partner_of:
            element, start = opened.pop(), partner_of[index]
            element.closing, element.end = token.raw, len(text)
            fixed -= tokens[start].is_fixed
            # the content of deeper ones is in this one
            if not fixed and (tokens[start].is_fixed or len(opened) == DEEPEST + 1):
                element.untranslated, element.children = "".join(other.raw for other in tokens[start + 1 : index]), []
            continue
        element = Element(token.raw, len(text), len(text))
        opened[-1].children.append(element)
        if token.kind == "placeholder":
            element.opening, element.untranslated = "", token.raw
            text += token.text
            element.end = len(text)
        elif token.kind == "start" and index in partner_of:
            opened.append(element)
            fixed += token.is_fixed
        else:
            is_nested &= token.kind == "single"
            text += " " if token.name in _BREAKS and text and not text[-1].isspace() else ""
    return Marked(text, root.children, is_nested)
