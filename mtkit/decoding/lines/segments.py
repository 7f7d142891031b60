"""Segments, the units of translation: a line, a part of an unusually long line, or several lines of a document."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, takewhile
from operator import ne

from mtkit.decoding.contract import Term
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.lines.splitting import split_sentences, split_to_fit
from mtkit.text.characters import is_blank
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer


@dataclass(frozen=True)
class Segment:
    """A unit of translation."""

    line: int
    """Index of its (first) line, from 0."""
    part: int
    """Index of the part in its line, from 0."""
    pieces: list[int]
    """Source pieces: the tag of the direction if there are several, text, EOS."""
    task: int | None = None
    """Index of the direction, if there are several."""
    prefix: tuple[int, ...] = ()
    """Given translations of its first lines, each with a break after it."""
    terms: tuple[Term, ...] = ()
    """The terms that its translation must contain."""


@dataclass(frozen=True)
class Window:
    """Neighbouring lines of a document that are translated together."""

    lines: list[int]
    """Their numbers."""
    context: list[int]
    """The numbers of the lines before them that are read again, with their translations."""
    place: int
    """Number of the window in its document, from 0, if there is context; windows without it depend on no other."""

    def known(self, translated: Callable[[int], Sequence[int]]) -> dict[int, Sequence[int]]:
        """Return the target pieces of the context's lines, EOS included, after the last line without a translation."""
        pairs = ((number, translated(number)) for number in reversed(self.context))
        return dict(reversed([*takewhile(lambda pair: len(pair[1]) > 1, pairs)]))

    def halves(self) -> "list[Window]":
        """Two windows with the lines, whose joint translation did not separate; none of one line.

        The second one is without context, because the first one is not translated before it.
        """
        half = len(self.lines) // 2
        if half == 0:
            return []
        return [replace(self, lines=self.lines[:half]), replace(self, lines=self.lines[half:], context=[])]


class Source:
    """The conversion of lines to segments of pieces."""

    def __init__(self, text: SourceLines | Sequence[str], tokenizer: Tokenizer, longest: int | None) -> None:
        """`longest` is the model's maximum number of pieces, tag and EOS counted."""
        text = SourceLines.of(text)
        self.lines, self._documents, self._tokenizer = text.lines, text.documents, tokenizer
        self._prefixes = text.prefixes
        self._glossary = text.glossary
        self._usual = cache(text.trained_on.usual)
        directions = text.directions
        self._languages = [None] if directions is None else [languages_of(name)[0] for name in directions.names]
        self._tasks = directions.tasks if directions is not None and len(directions.names) > 1 else None
        self._tags = [] if directions is None else tokenizer.tags(directions.names)
        self.longest = None if longest is None else longest - 1 - bool(self._tags)
        """Maximum pieces of text in a segment."""

    @cached_property
    def encoded(self) -> list[list[int]]:
        """The pieces of each line; a blank line has none."""
        encoded = self._tokenizer.encode_lines(self.lines)
        return [[] if is_blank(line) else pieces for line, pieces in zip(self.lines, encoded, strict=True)]

    def task(self, line: int) -> int | None:
        """Return the task of a line, if there are several."""
        return None if self._tasks is None else int(self._tasks[line])

    def tag(self, line: int) -> list[int]:
        """Return the piece that precedes a line, if the tokenizer has one for its direction; otherwise empty."""
        return [self._tags[self.task(line) or 0]] if self._tags else []

    def segment(self, line: int, pieces: Sequence[int], part: int = 0) -> Segment:
        """Return the segment of these pieces of text, truncated at the limit of the model."""
        return Segment(line, part, [*self.tag(line), *pieces[: self.longest], EOS], self.task(line))

    def segments(self, numbers: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments of the lines with these numbers: none for a blank line, several for a split line."""
        for number in numbers:
            for part, (text, pieces) in enumerate(self.parts(number)):
                segment = self.segment(number, pieces, part)
                yield segment if self._glossary is None else replace(segment, terms=self._glossary.terms(text))

    def parts(self, number: int) -> list[tuple[str, list[int]]]:
        """Return the texts into which a line is split, or the line itself, each with its pieces; none of a blank line.

        They are in the order of the line; white space between them may be left out.
        """
        line, pieces, task = self.lines[number], self.encoded[number], self.task(number)
        if not pieces:
            return []

        def count(texts: Sequence[str]) -> list[int]:
            return [len(text) for text in self._tokenizer.encode_lines(texts)]

        language, texts = self._languages[task or 0], [line]
        # a given beginning may be of several sentences, so its line is split only if it is too long for the model
        usual = None if self._prefixes and self._prefixes[number].strip() else self._usual(task)
        if usual is not None:
            room = usual.pieces - 1 - len(self._tags[:1])
            texts = split_sentences(line, language, count, most=usual.sentences, pieces=room)
        if self.longest is not None and (len(texts) > 1 or len(pieces) > self.longest):
            texts = [part for text in texts for part in split_to_fit(text, self.longest, count, language)]
        parts = self._tokenizer.encode_lines(texts) if len(texts) > 1 else [pieces]
        return [(text, part) for text, part in zip(texts, parts, strict=True) if part]

    def windows(self) -> list[Window]:
        """Return the lines to translate together: neighbours in a document, with `Documents.context` lines before them.

        Lines that are blank or split are in no window, and a window of one line has context. Windows stay within the
        limits of the documents and the model. Context takes at most half of them.
        """
        if self._documents is None:
            return []
        budget, ids = self._documents.pieces, self._documents.ids
        if self.longest is not None:
            budget = min(budget, self.longest)
        # a document also ends if the id changes on a blank line only
        documents = list(accumulate(map(ne, ids, ids[1:]), initial=0))
        unsplit = (number for number in range(len(self.lines)) if len(self.parts(number)) == 1)
        windows: list[Window] = []
        for _, document in groupby(unsplit, key=lambda number: (documents[number], self.task(number))):
            window, size = Window([], [], -1), budget  # the first line begins a window
            for number in document:
                room = self._size(number)
                if size + room > budget + 1 + len(self.tag(number)):
                    context = self._context([*window.context, *window.lines], min(budget // 2, budget - room))
                    window = Window([], context, window.place + 1 if self._documents.context else 0)
                    windows.append(window)
                    size = sum(map(self._size, context))
                window.lines.append(number)
                size += room
        return [window for window in windows if len(window.lines) + len(window.context) > 1]

    def _size(self, number: int) -> int:
        """Return the pieces that a line takes among joined lines, with its tag and a break."""
        return 1 + len(self.tag(number)) + len(self.encoded[number])

    def _context(self, before: Sequence[int], room: int) -> list[int]:
        """Return the last of the lines `before`, as many as are wanted and fit into that number of pieces."""
        assert self._documents is not None
        chosen: list[int] = []
        for number in before[::-1][: self._documents.context]:
            room -= self._size(number)
            if room < 0:
                break
            chosen.insert(0, number)
        return chosen

    def join_lines(self, numbers: Sequence[int], translated: Iterable[Sequence[int]] = ()) -> Segment:
        """Lines of a document as one segment, each with its tag, separated by breaks.

        `translated` has the target pieces of the first lines, EOS included, if they are known.
        """
        pieces = list(self.encoded[numbers[0]])
        for number in numbers[1:]:
            pieces += [BREAK, *self.tag(number), *self.encoded[number]]
        prefix = tuple(piece for line in translated for piece in (*line[:-1], BREAK))
        return replace(self.segment(numbers[0], pieces), prefix=prefix)


def split_lines(tokenizer: Tokenizer, pieces: Sequence[int], lines: int) -> list[tuple[str, tuple[int, ...]]] | None:
    """Return the text and the pieces, with EOS, of each line in a joint translation.

    None if the translation does not consist of that number of lines, or if one of them is empty.
    """
    parts: list[list[int]] = [[]]
    for piece in pieces:
        if piece == BREAK:
            parts.append([])
        elif piece != EOS:
            parts[-1].append(piece)
    texts = [(tokenizer.decode(part), (*part, EOS)) for part in parts]
    return texts if len(texts) == lines and all(text.strip() for text, _ in texts) else None
