"""Placement of tags in a translation, by the links between its words and the source's words.

An element encloses the words of the translation that are linked to its words, as the longest run without words of its
siblings. A tag without linked words follows the translation of the word before it. Placeholders, such as {name} and %s,
and text with `translate="no"` replace their copy in the translation, or else the words linked to them. If those are
more than their share of the line, the links are wrong: then they replace nothing. So each tag and each placeholder of
the source is in the target once, and elements are nested as in the source.
"""

import html
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from unicodedata import category

from mtkit.text.markup import PLACEHOLDER, Element, Marked
from mtkit.text.words import word_starts, words

INFLECTION = 2
"""Maximum letters in the same word as a placeholder that count as its inflection, as in {name}'s."""


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
    for match in PLACEHOLDER.finditer(target):
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
