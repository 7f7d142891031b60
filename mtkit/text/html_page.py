"""HTML: the segments of a page that are translated, and what is between them, which stays as it is.

Text with inline tags, such as <b>, is a segment (`mtkit.text.markup`). Block tags, such as <p>, <td> and <br>, separate
segments. The page is cut into stretches whose join is the page, so broken HTML is translated too, and nothing is lost.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import chain, groupby, pairwise
from typing import Literal

from mtkit.text.markup import VOID, Marked, Token, build, partners, text_tokens, unescape
from mtkit.text.tag_placement import restore

_BLOCKS = """
address area article aside audio base blockquote body br button canvas caption center col colgroup datalist dd details
dialog dir div dl dt embed fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr
html iframe input legend li link main map menu meta nav noembed noframes noscript object ol optgroup option p param
plaintext pre script search section select source style summary table tbody td template textarea tfoot th thead title tr
track ul video xmp
"""
BLOCKS = frozenset(_BLOCKS.split())
"""Elements whose tags separate segments. Unknown elements do not, as in browsers."""

_OPAQUE = "iframe math noembed noframes plaintext script style svg template textarea xmp"
OPAQUE = frozenset(_OPAQUE.split())
"""Elements that stay as they are, and whose text the model does not read."""

READINGS = frozenset(["rp", "rt", "rtc"])
"""Elements with the pronunciation of the text before them in <ruby>: they stay, and the model does not read them."""

FIXED = frozenset(["code", "kbd", "samp", "var"])
"""Inline elements whose text the model reads, and that stay as they are, as with translate="no"."""

_UNFINISHED = 50
"""Tags and comments without an end that are read as text; for each, the parser may search the rest of the page."""

_SPACE = re.compile(r"[ \t\n\r\f]+")
_STRETCH = re.compile(r"[ \t\n\r\f]+|[^ \t\n\r\f]+(?:[ \t\n\r\f]+[^ \t\n\r\f]+)*")
_LIKE_A_TAG = re.compile(r"<[A-Za-z/!?]")
_LINE_END = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True)
class Page:
    """Segments, and the text before, between and after them."""

    between: tuple[str, ...]
    """One more than segments."""
    segments: tuple[Marked, ...]

    @property
    def text(self) -> str:
        """The text of each segment, which the model reads, on a line of its own."""
        return "\n".join(segment.text for segment in self.segments)

    def split(self) -> "list[Page]":
        """Pages of a segment each, whose translations in order are the translation of this page."""
        *others, last = self.between
        pages = [Page((text, ""), (segment,)) for text, segment in zip(others, self.segments, strict=True)]
        return [*pages[:-1], Page((*pages[-1].between[:1], last), self.segments[-1:])] if pages else [self]

    def restore(self, targets: Sequence[str], links: Sequence[Iterable[tuple[int, int]]]) -> str:
        """The page with translations of `text`'s lines, by links as in `mtkit.text.tag_placement.restore`."""
        page = self.between[0]
        # not strict: without segments, `text` is one empty line
        for segment, target, its_links, text in zip(self.segments, targets, links, self.between[1:], strict=False):
            page += restore(segment, target, its_links) + text
        return page


def parse_page(text: str) -> Page:
    """Cut HTML into its segments and what is between them; text without a letter is no segment."""
    tokens = _without_opaque([*_tokens(text)])
    partner_of = partners(tokens)
    between, segments = [""], list[Marked]()
    for is_break, group in groupby(range(len(tokens)), lambda index: tokens[index].kind == "break"):
        members = [*group]
        place, stop = members[0], members[-1] + 1
        for first, last in [] if is_break else _cores(tokens, partner_of, place, stop):
            between[-1] += _raw(tokens[place:first])
            segments.append(build([*_closed(tokens, partner_of, first, last)]))
            between.append("")
            place = last + 1
        between[-1] += _raw(tokens[place:stop])
    return Page(tuple(between), tuple(segments))


def _raw(tokens: Iterable[Token]) -> str:
    return "".join(token.raw for token in tokens)


class _TooBrokenError(Exception):
    """The rest of the page is not worth parsing."""


class _Reader(HTMLParser):
    """The tags and texts of a page, with the indices of their first characters.

    After `_UNFINISHED` tags and comments without an end, the rest of the page is one text.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.starts: list[tuple[int, Token]] = []
        self._lines = [0, *(match.end() for match in re.finditer("\n", page))]
        self._unfinished = 0
        try:
            self.feed(page.replace("&", "_"))  # texts are resolved later
            self.close()
        except _TooBrokenError:
            self.handle_data("")

    def _counted(self, end: int) -> int:
        """Return the end of a tag or comment; -1: it has none."""
        self._unfinished += end < 0
        if self._unfinished > _UNFINISHED:
            raise _TooBrokenError
        return end

    def parse_starttag(self, i: int) -> int:
        """Counts tags without an end."""
        return self._counted(super().parse_starttag(i))

    def parse_endtag(self, i: int) -> int:
        """Counts tags without an end."""
        return self._counted(super().parse_endtag(i))

    def parse_comment(self, i: int, report: bool = True) -> int:
        """Counts comments without an end."""
        return self._counted(super().parse_comment(i, report))

    def parse_pi(self, i: int) -> int:
        """Counts instructions without an end."""
        return self._counted(super().parse_pi(i))

    def parse_html_declaration(self, i: int) -> int:
        """Counts declarations without an end."""
        return self._counted(super().parse_html_declaration(i))

    def _add(
        self, kind: Literal["text", "start", "end", "single", "break"], name: str = "", is_fixed: bool = False
    ) -> None:
        line, column = self.getpos()
        self.starts.append((self._lines[line - 1] + column, Token("", kind, name, is_fixed=is_fixed)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Adds a tag; elements without an end tag are single."""
        values = dict(attrs)
        stays = (values.get("translate") or "").lower() == "no" or "notranslate" in (values.get("class") or "").split()
        self._add("single" if tag in VOID else "start", tag, tag in FIXED or stays)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Adds a tag; only elements that HTML does not define end with />."""
        self._add("single", tag)

    def handle_endtag(self, tag: str) -> None:
        """Adds a tag."""
        self._add("end", tag)

    def handle_data(self, data: str) -> None:
        """Adds a text; a text after a text is the same one."""
        if not self.starts or self.starts[-1][1].kind != "text":
            self._add("text")

    def handle_comment(self, data: str) -> None:
        """Adds a comment."""
        self._add("single")

    def handle_decl(self, decl: str) -> None:
        """Adds a declaration, such as <!doctype html>."""
        self._add("break")

    def handle_pi(self, data: str) -> None:
        """Adds a processing instruction, such as <?xml ?>."""
        self._add("break")

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Adds <![ up to the next >; the base class raises an error for some."""
        self._add("single")
        return self.rawdata.find(">", i) + 1 or -1


def _tokens(page: str) -> Iterator[Token]:
    """The page in tokens; a text that looks like a tag is one that the parser could not read, and stays."""
    starts = [(0, Token("", "text")), *_Reader(page).starts, (len(page), Token("", "break"))]
    for (start, token), (stop, _) in pairwise(starts):
        raw = page[start:stop]
        if token.kind != "text":
            yield replace(token, raw=raw)
        elif raw:
            unread = _LIKE_A_TAG.search(raw)
            end = len(raw) if unread is None else unread.start()
            yield from text_tokens(raw[:end])
            if unread is not None:
                yield Token(raw[end:], "single")


def _without_opaque(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with one each for elements that stay, with block tags as breaks, and with texts as they are shown."""
    partner_of, merged, preformatted, index = partners(tokens), list[Token](), 0, 0
    while index < len(tokens):
        token, stop = tokens[index], index + 1
        is_block = token.name in BLOCKS
        is_reading = token.name in READINGS and index in partner_of
        if token.kind == "start" and (token.name in OPAQUE or token.is_fixed or is_reading):
            stop = partner_of.get(index, len(tokens) - 1 if token.name in OPAQUE else index) + 1
            is_block |= any(other.name in BLOCKS for other in tokens[index:stop])
            if not is_block and token.name not in OPAQUE and not is_reading:
                merged += chain.from_iterable(map(_shown, tokens[index:stop]))
            else:
                kind: Literal["break", "single"] = "break" if is_block else "single"
                merged.append(Token(_raw(tokens[index:stop]), kind))
        elif token.kind == "text" and preformatted > 0:
            merged += _lines(token)
        else:
            preformatted += (token.name == "pre") * ((token.kind == "start") - (token.kind == "end"))
            merged += [replace(token, kind="break")] if is_block else _shown(token)
        index = stop
    return merged


def _shown(token: Token) -> Iterator[Token]:
    """A text with white space as a browser shows it, apart from the spaces at its ends; other tokens as they are."""
    if token.kind != "text":
        yield token
        return
    for match in _STRETCH.finditer(token.raw):
        yield replace(token, raw=match[0], text=_SPACE.sub(" ", unescape(_SPACE.sub(" ", match[0]))))


def _lines(token: Token) -> Iterator[Token]:
    """The lines of a preformatted text, with breaks between them."""
    for number, line in enumerate(_LINE_END.split(token.raw)):
        if number % 2:
            yield Token(line, "break")
        else:
            yield from _shown(replace(token, raw=line))


def _cores(tokens: Sequence[Token], partner_of: dict[int, int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The segments of a stretch without breaks, as first token and last: without tags and spaces at the edges.

    If elements from before the stretch end in a segment and others begin that go on after it, it is divided between
    them: with words in another order, the tags might not be nested.
    """
    spans = [
        (index, partner_of[index]) for index in range(start, stop) if tokens[index].is_fixed and index in partner_of
    ]
    fixed = {index for first, last in spans for index in range(first, last + 1)}
    content = [index for index in range(start, stop) if index in fixed or tokens[index].text.strip()]
    if not any(character.isalpha() for index in content if index not in fixed for character in tokens[index].text):
        return
    first, last = content[0], content[-1]
    first = next((index for index in range(start, first) if first <= partner_of.get(index, -1) <= last), first)
    last = next((index for index in range(stop - 1, last, -1) if first <= partner_of.get(index, -1) <= last), last)
    ended, begun = _crossing(tokens, partner_of, first, last)
    if ended and begun:
        yield from _cores(tokens, partner_of, start, begun[0])
        yield from _cores(tokens, partner_of, begun[0], stop)
    else:
        yield first, last


def _crossing(
    tokens: Sequence[Token], partner_of: dict[int, int], first: int, last: int
) -> tuple[list[int], list[int]]:
    """The end tags of elements from before the first token, and the start tags of elements that end after the last."""
    inside = range(first, last + 1)
    ended = [index for index in inside if tokens[index].kind == "end" and partner_of.get(index, first) < first]
    return ended, [index for index in inside if tokens[index].kind == "start" and partner_of.get(index, first) > last]


def _closed(tokens: Sequence[Token], partner_of: dict[int, int], first: int, last: int) -> Iterator[Token]:
    """The tokens of a segment without double spaces; elements from before it or that go on after get empty tags."""
    ended, begun = _crossing(tokens, partner_of, first, last)
    yield from (Token("", "start", tokens[index].name) for index in reversed(ended))
    is_spaced = False
    for token in tokens[first : last + 1]:
        yield replace(token, text="") if is_spaced and token.text == " " else token
        is_spaced = token.text == " " or (is_spaced and not token.text)
    yield from (Token("", "end", tokens[index].name) for index in reversed(begun))
