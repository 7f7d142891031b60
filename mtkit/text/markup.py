"""Inline tags of a line: taken out before translation, and put back by the links between words.

The model reads the text without tags. An element encloses the words of the translation that are linked to its words, as
the longest run without words of its siblings. A tag without linked words follows the translation of the word before it.
Text with `translate="no"` and placeholders, such as {name} and %s, replace what they are linked to. So each tag and
each placeholder of the source is in the target once, and elements are nested as in the source.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mtkit.text.words import word_starts, words

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
"""Elements of HTML that have no end tag."""

_BREAKS = frozenset({"br", "hr"})
"""Elements that separate words."""

_TAG = re.compile(
    r"<!--.*?-->|<(?P<end>/)?(?P<name>[A-Za-z][\w:.-]*)(?P<rest>(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*?)(?P<void>/)?>"
    r"|(?P<kept>\{\{[^{}\s]+\}\}|\$?\{[^{}\s]*\}|%(?:\(\w+\)|\d+\$)?[sdf](?![^\W_]))"
)
_FIXED = re.compile(r"\btranslate\s*=\s*[\"']?no\b|\bnotranslate\b")


@dataclass
class Element:
    """An element, a single tag, or a text that stays, in the text of a line."""

    opening: str
    begin: int
    """Index of the first character in the text without tags."""
    end: int = 0
    closing: str = ""
    kept: str | None = None
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
    text, place, is_nested, root = "", 0, True, Element("", 0)
    open_elements, names, content = [root], [""], [0]

    def drop_to(depth: int) -> None:
        """Make single tags of the elements above a depth, whose end tags are missing."""
        while len(open_elements) > depth:
            lost = open_elements.pop()
            names.pop(), content.pop()
            open_elements[-1].children += lost.children
            lost.children, lost.end = [], lost.begin

    for match in _TAG.finditer(line):
        text += html.unescape(line[place : match.start()])
        place = match.end()
        name = (match["name"] or "").lower()
        if match["end"] and name in names:
            depth = len(names) - names[::-1].index(name)
            is_nested &= depth == len(names)
            drop_to(depth)
            names.pop()
            element, inner = open_elements.pop(), line[content.pop() : match.start()]
            element.closing, element.end = match[0], len(text)
            if _FIXED.search(element.opening):
                element.kept, element.children = inner, []
            continue
        element = Element(match[0], len(text), len(text))
        open_elements[-1].children.append(element)
        if match["kept"]:
            element.opening, element.kept = "", match[0]
            text += match[0]
            element.end = len(text)
        elif name and not match["end"] and not match["void"] and name not in VOID:
            open_elements.append(element)
            names.append(name)
            content.append(place)
        else:
            is_nested &= not match["end"]
            text += " " if name in _BREAKS and text and not text[-1].isspace() else ""
    text += html.unescape(line[place:])
    is_nested &= len(open_elements) == 1
    drop_to(1)
    return Marked(text, root.children, is_nested)


def restore(marked: Marked, target: str, links: Iterable[tuple[int, int]]) -> str:
    """Return the translation with the tags of its line, and with character references for &, < and >.

    `links` are pairs of a source word and a target word, by number.
    """
    return _Placing(marked.text, target, links).build(marked.elements, 0, len(target), 0, None)


class _Placing:
    """The places of elements in a translation."""

    def __init__(self, source: str, target: str, links: Iterable[tuple[int, int]]) -> None:
        self._source, self._target = source, target
        self._source_spans, self._spans = _spans(source), _spans(target)
        self._begins = [begin for begin, _ in self._spans]
        self._links: dict[int, int] = {}
        """A source word, by the target word that is linked to it."""
        self._targets: dict[int, int] = {}
        """The last target word, by the source word that it is linked to."""
        for one, other in sorted(links):
            self._links.setdefault(other, one)
            self._targets[one] = other

    def build(self, elements: Sequence[Element], begin: int, end: int, low: int, high: int | None) -> str:
        """The characters `begin` to `end` of the target, its words `low` to `high`, with elements."""
        high = len(self._spans) if high is None else high
        owners = self._owners(elements, low, high)
        runs = {number: _longest_run(owners, number, low) for number in range(len(elements))}
        placed = []
        for number, element in enumerate(elements):
            first, last = runs[number] or (self._place(element, low, high, [run for run in runs.values() if run]),) * 2
            placed.append((first, last, number))
        text, at = "", begin
        for first, last, number in sorted(placed):
            element = elements[number]
            start = self._begins[first] if first < high else end
            start = max(at, min(start, end))
            stop = start if first == last else max(start, min(self._end(element, last), end))
            text += html.escape(self._target[at:start], quote=False) + element.opening
            if element.kept is not None:
                text += element.kept
            else:
                text += self.build(element.children, start, stop, first, last)
            text, at = text + element.closing, stop
        return text + html.escape(self._target[at:end], quote=False)

    def _owners(self, elements: Sequence[Element], low: int, high: int) -> list[int | None]:
        """For each target word, the number of the element that has the source word linked to it."""
        of_words = {word: number for number, element in enumerate(elements) for word in self._words(element)}
        return [of_words.get(self._links.get(word, -1)) for word in range(low, high)]

    def _words(self, element: Element) -> Iterable[int]:
        """The source words that overlap with an element."""
        spans = enumerate(self._source_spans)
        return [word for word, (begin, end) in spans if begin < element.end and end > element.begin]

    def _place(self, element: Element, low: int, high: int, taken: Sequence[tuple[int, int]]) -> int:
        """The target word before which an element without words stands, outside of its siblings."""
        before = [word for word, (begin, _) in enumerate(self._source_spans) if begin < element.begin]
        linked = next((self._targets[word] + 1 for word in reversed(before) if word in self._targets), 0)
        place = min(max(linked, low), high)
        return next((last for first, last in taken if first < place < last), place)

    def _end(self, element: Element, last: int) -> int:
        """The end of an element's last word; punctuation after the element in the source is left out."""
        begin, end = self._spans[last - 1]
        follows = self._source[element.end : element.end + 1]
        if follows and not follows.isspace() and not follows.isalnum():
            word = self._target[begin:end]
            while len(word) > 1 and not word[-1].isalnum():
                word = word[:-1]
            end = begin + len(word)
        return end


def _spans(text: str) -> list[tuple[int, int]]:
    return [(start, start + len(word)) for start, word in zip(word_starts(text), words(text), strict=True)]


def _longest_run(owners: Sequence[int | None], number: int, low: int) -> tuple[int, int] | None:
    """The words from the first to after the last of the run with the most words of an owner; None if it has none."""
    best, start, last, count = (0, 0, 0), 0, 0, 0
    for place, owner in enumerate([*owners, -1]):
        if owner == number:
            start, count, last = (place if not count else start), count + 1, place + 1
        elif owner is not None:
            best, count = max(best, (count, -start, last)), 0
    count, start, last = best
    return (low - start, low + last) if count else None
