"""Inline tags of a line: taken out before translation, and put back by the links between words.

The model reads the text without tags. An element encloses the words of the translation that are linked to its words, as
the longest run without words of its siblings. A tag without linked words follows the translation of the word before it.
Placeholders, such as {name} and %s, and text with `translate="no"` replace their copy in the translation, or else the
words linked to them. If those are more than their share of the line, the links are wrong: then they replace nothing. So
each tag and each placeholder of the source is in the target once, and elements are nested as in the source.
"""

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal
from unicodedata import category

from mtkit.text.words import word_starts, words

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
"""Elements of HTML that have no end tag."""

DEEPEST = 100
"""Maximum depth of elements whose text is translated; deeper ones stay as they are."""

INFLECTION = 2
"""Maximum letters in the same word as a placeholder that count as its inflection, as in {name}'s."""

_BREAKS = frozenset({"br", "hr"})
"""Elements that separate words."""

_TAG = re.compile(
    r"(?P<comment><!--)|<(?P<end>/)?(?P<name>[A-Za-z][\w:.-]*+)(?P<rest>(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*?)(?P<void>/)?>"
)
_PLACEHOLDER = re.compile(r"\{\{[^{}\s]+\}\}|\$?\{[^{}\s]*\}|%(?:\(\w+\)|\d+\$)?[sdf](?![0-9A-Za-z\u00c0-\u052f])")
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
    for match in _PLACEHOLDER.finditer(raw):
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


def restore(marked: Marked, target: str, links: Iterable[tuple[int, int]]) -> str:
    """Return the translation with the tags of its line, and with character references for &, < and >.

    `links` are pairs of a source word and a target word, by number.
    """
    return _Placing(marked, target, links).build(marked.elements, 0, len(target), 0, None)


class _Placing:
    """The places of elements in a translation."""

    def __init__(self, marked: Marked, target: str, links: Iterable[tuple[int, int]]) -> None:
        self._source, self._target = marked.text, target
        self._source_spans, self._spans = _spans(marked.text), _spans(target)
        self._begins = [begin for begin, _ in self._spans]
        self._copies = _copies(marked.elements, target)
        """First character and end of a placeholder's copy in the target, by the placeholder's place in the source."""
        self._links: dict[int, int] = {}
        """A source word, by the target word that is linked to it."""
        self._targets: dict[int, int] = {}
        """The last target word, by the source word that it is linked to."""
        for source_word, target_word in [*self._links_of_copies(), *sorted(links)]:
            self._links.setdefault(target_word, source_word)
            self._targets[source_word] = target_word
        self._linked = sorted(self._targets)

    def _links_of_copies(self) -> Iterator[tuple[int, int]]:
        for place, (begin, _) in self._copies.items():
            source_word = bisect_right(self._source_spans, place, key=lambda span: span[0]) - 1
            yield source_word, bisect_right(self._begins, begin) - 1

    def build(self, elements: Sequence[Element], begin: int, end: int, low: int, high: int | None) -> str:
        """The characters `begin` to `end` of the target, its words `low` to `high`, with elements."""
        high = len(self._spans) if high is None else high
        fixed = {number for number, element in enumerate(elements) if element.untranslated is not None}
        runs = _longest_runs(self._owners(elements, low, high), low, fixed)
        placed = []
        for number, element in enumerate(elements):
            first, last = runs.get(number) or (self._place(element, low, high, runs.values()),) * 2
            start = self._begins[first] if first < high else end
            stop = start if first == last else self._end(element, last)
            if number in fixed:
                start, stop = self._replaced(element, first, last, start)
            placed.append((start, stop, number, first, last))
        text, at = "", begin
        for wanted_start, wanted_stop, number, first, last in sorted(placed):
            element = elements[number]
            start = max(at, min(wanted_start, end))
            stop = max(start, min(wanted_stop, end))
            text += html.escape(self._target[at:start], quote=False)
            if element.untranslated is None:
                text += element.opening + self.build(element.children, start, stop, first, last) + element.closing
            else:
                before, after = self._spaces(element, start) if start == stop else ("", "")
                text += before + element.opening + element.untranslated + element.closing + after
            at = stop
        return text + html.escape(self._target[at:end], quote=False)

    def _replaced(self, element: Element, first: int, last: int, start: int) -> tuple[int, int]:
        """First character and end of what an element that stays as it is replaces: its copy, or words linked to it.

        It replaces nothing at `start` if its words `first` to `last` are more than its share of the target, or if
        the words that it belongs to have more letters than it, which the target's words may translate.
        """
        if not element.opening and element.begin in self._copies:
            return self._copies[element.begin]
        of_source = self._words(element)
        share = -(-len(self._spans) * len(of_source) // max(len(self._source_spans), 1))
        if not 0 < last - first <= share:
            return start, start
        begin, end = self._begins[first], self._spans[last - 1][1]
        before = self._source[self._source_spans[of_source[0]][0] : element.begin]
        after = self._source[element.end : self._source_spans[of_source[-1]][1]]
        same_before = _common(before, self._target[begin:end])
        same_after = _common(after[::-1], self._target[begin + same_before : end][::-1])
        rest = before[same_before:] + after[: len(after) - same_after]
        if sum(map(str.isalnum, rest)) > INFLECTION:
            return start, start
        begin, end = begin + same_before, end - same_after
        own = self._source[element.begin : element.end]
        while begin < end and _is_punctuation(self._target[begin]) and self._target[begin] != own[:1]:
            begin += 1
        while begin < end and _is_punctuation(self._target[end - 1]) and self._target[end - 1] != own[-1:]:
            end -= 1
        return begin, end

    def _spaces(self, element: Element, place: int) -> tuple[str, str]:
        """The spaces that separate an element that replaces nothing from words, unless the source has none."""
        before = self._source[max(element.begin - 1, 0) : element.begin]
        after = self._source[element.end : element.end + 1]
        left, right = self._target[max(place - 1, 0) : place], self._target[place : place + 1]
        return " " * (bool(left.strip()) and not before.isalnum()), " " * (right.isalnum() and not after.isalnum())

    def _owners(self, elements: Sequence[Element], low: int, high: int) -> list[int | None]:
        """For each target word, the number of the element that has the source word linked to it."""
        of_words = {word: number for number, element in enumerate(elements) for word in self._words(element)}
        return [of_words.get(self._links.get(word, -1)) for word in range(low, high)]

    def _words(self, element: Element) -> range:
        """The source words that overlap with an element."""
        first = bisect_right(self._source_spans, element.begin, key=lambda span: span[1])
        return range(first, bisect_left(self._source_spans, element.end, key=lambda span: span[0]))

    def _place(self, element: Element, low: int, high: int, taken: Iterable[tuple[int, int]]) -> int:
        """The target word before which an element without words is placed, outside of its siblings."""
        word = bisect_left(self._source_spans, element.begin, key=lambda span: span[0])
        linked_words = bisect_left(self._linked, word)  # those before it
        linked = self._targets[self._linked[linked_words - 1]] + 1 if linked_words else 0
        place = min(max(linked, low), high)
        return next((last for first, last in taken if first < place < last), place)

    def _end(self, element: Element, last: int) -> int:
        """The end of an element's last word; punctuation after the element in the source is left out."""
        begin, end = self._spans[last - 1]
        follows = self._source[element.end : element.end + 1]
        if follows and not follows.isspace() and not follows.isalnum():
            word = self._target[begin:end]
            while len(word) > 1 and _is_punctuation(word[-1]):
                word = word[:-1]
            end = begin + len(word)
        return end


def _spans(text: str) -> list[tuple[int, int]]:
    return [(start, start + len(word)) for start, word in zip(word_starts(text), words(text), strict=True)]


def _copies(elements: Iterable[Element], target: str) -> dict[int, tuple[int, int]]:
    """First character and end of the target's copy of each placeholder, by the placeholder's place in the source."""
    found = defaultdict[str, list[tuple[int, int]]](list)
    for match in _PLACEHOLDER.finditer(target):
        found[match[0]].append(match.span())
    copies, waiting = dict[int, tuple[int, int]](), [*elements]
    while waiting:
        element = waiting.pop()
        waiting += element.children
        if not element.opening and (spans := found.get(element.untranslated or "")):
            copies[element.begin] = spans.pop()
    return copies


def _common(one: str, other: str) -> int:
    """The number of first characters that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_punctuation(character: str) -> bool:
    return category(character)[0] in "PS"


def _longest_runs(owners: Sequence[int | None], low: int, fixed: Collection[int]) -> dict[int, tuple[int, int]]:
    """For each owner of words, its run with the most words: the first word, and one after the last.

    Words without an owner end only a run of the `fixed`. `low` is the number of the first word.
    """
    best: dict[int, tuple[int, int, int]] = {}
    owner, start, count = None, 0, 0
    for place, other in enumerate(owners, low):
        if other is None:
            owner = None if owner in fixed else owner
            continue
        if other != owner:
            owner, start, count = other, place, 0
        count += 1
        best[other] = max(best.get(other, (0, 0, 0)), (count, -start, place + 1))
    return {owner: (-start, last) for owner, (_, start, last) in best.items()}
