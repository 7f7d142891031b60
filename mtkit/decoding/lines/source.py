"""Segments, the units of translation: a line, a part of an unusually long line, or several lines of a document."""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, takewhile
from operator import ne
from typing import Self

from mtkit.data.lengths import Lengths
from mtkit.data.prepared import Prepared
from mtkit.decoding.contract import Term
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.splitting import split_sentences, split_to_fit
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer

UNSEEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})
"""Unicode's categories of white space, controls and format marks, such as zero-width spaces and byte order marks."""


def is_blank(line: str) -> bool:
    """Whether a line shows nothing: it contains only white space and invisible characters."""
    return all(unicodedata.category(character) in UNSEEN for character in line)


@dataclass(frozen=True)
class Directions:
    """The direction of each line."""

    names: Sequence[str]
    """The directions that the model was trained on, as en-fr, in its order."""
    tasks: Sequence[int]
    """For each line, the index of its direction."""

    @classmethod
    def alike(cls, names: Sequence[str], chosen: str | None, lines: int) -> Self:
        """The same direction for all lines; None: the only one.

        Raises: MtkitError for an unknown direction, and for None if there are several; the message lists them.
        """
        listed = ", ".join(names)
        if chosen is None and len(names) > 1:
            raise MtkitError(f"the run was trained on several directions; choose one with --direction: {listed}")
        if chosen is not None and chosen not in names:
            hint = did_you_mean(chosen, list(names))
            raise MtkitError(f"the run was not trained on the direction {shown(chosen)}{hint}; it supports: {listed}")
        return cls(names, [0 if chosen is None else names.index(chosen)] * lines)

    def among(self, supported: Sequence[str]) -> "Directions":
        """The same directions for a model that supports these; two single directions match whatever their names.

        Raises: MtkitError for a line whose direction the model does not support.
        """
        if len(supported) == len(self.names) == 1:
            return Directions(supported, self.tasks)
        for name in dict.fromkeys(self.names_of_lines()):
            if name not in supported:
                raise MtkitError(
                    f"there are lines of the direction {name}, and the run supports: {', '.join(supported)}"
                )
        return Directions(supported, [supported.index(name) for name in self.names_of_lines()])

    def at(self, rows: Sequence[int]) -> "Directions":
        """The directions of some lines."""
        return Directions(self.names, [self.tasks[row] for row in rows])

    def names_of_lines(self) -> list[str]:
        """The direction of each line by name."""
        return [self.names[task] for task in self.tasks]

    def targets_of_lines(self) -> list[str]:
        """The target language of each line."""
        targets = [languages_of(name)[1] for name in self.names]
        return [targets[task] for task in self.tasks]


@dataclass(frozen=True)
class Documents:
    """The document of each line, and how much of a document is translated at once."""

    ids: Sequence[int] | Sequence[str]
    """For each line, the id of its document; a changed id begins a new document."""
    pieces: int
    """Maximum source pieces of joined lines, breaks counted."""
    context: int = 0
    """Lines that are read again before the next lines of a document (`DecodingSettings.context`)."""

    def under(self, settings: DecodingSettings) -> "Documents":
        """The same documents with the numbers of pieces and context lines of these settings."""
        return replace(self, pieces=settings.document_pieces or self.pieces, context=settings.context)

    def at(self, rows: Sequence[int]) -> "Documents":
        """The documents of some lines."""
        return replace(self, ids=[self.ids[row] for row in rows])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Usual:
    """The amount of text that a model has learned to translate at once."""

    sentences: int | None
    """Maximum number; None if any number is usual, or if sentences of the training lines were not counted."""
    pieces: int
    """Maximum number, tag and end of the segment counted."""


@dataclass(frozen=True)
class TrainedOn:
    """The lengths of the training pairs, for one model or for each model of an ensemble."""

    models: Sequence[Sequence[Lengths]] = ()
    """For each model, the lengths in each direction; empty if the lengths of one model are unknown."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """The lengths of these runs; runs of earlier versions have none. Raises: RunError."""
        known = [run.lengths for run in runs if run.lengths is not None]
        return cls(known if len(known) == len(runs) else ())

    @property
    def fingerprint(self) -> str:
        """A hash of the lengths."""
        text = "\n".join(lengths.model_dump_json() for model in self.models for lengths in model)
        return hashlib.sha256(f"{len(self.models)}\n{text}".encode()).hexdigest()

    def limits(self, pieces: Sequence[int], task: int | None, most: int | None = None) -> list[int]:
        """The maximum number of pieces of each line in a segment's translation, with the break or EOS at its end.

        It is `most` if given, else `Lengths.limit` of the training pairs of the direction (the largest in an ensemble),
        and at least twice the pieces of the line and 20: text unlike the training data, such as a line of numbers, may
        have longer translations than any pair.
        """
        sizes = [len(list(line)) + 1 for is_break, line in groupby(pieces, BREAK.__eq__) if not is_break]
        sizes[-1:] = [size - 1 for size in sizes[-1:]]  # the last line contains the end of the segment already
        known = self._of(task)
        return [most or max([2 * size + 20, *(lengths.limit(size) or 0 for lengths in known)]) for size in sizes]

    def limit(self, pieces: Sequence[int], task: int | None, longest: int | None, most: int | None = None) -> int:
        """The maximum number of pieces of a segment's translation: the sum of `limits`.

        It never exceeds `longest`, the limit of the model.
        """
        limit = sum(self.limits(pieces, task, most))
        return limit if longest is None else min(limit, longest)

    def usual(self, task: int | None) -> Usual | None:
        """The usual amount of text in a line of the training sides of a direction; None if unknown.

        It also limits lines of models trained on documents: those learned sentences joined by breaks, which a line of
        several sentences lacks.
        """
        known = self._of(task)
        counted = [lengths.sentences_at_once for lengths in known if lengths.sentences_at_once is not None]
        if not known:
            return None
        return Usual(min(counted, default=None), min(lengths.pieces_at_once for lengths in known))

    def _of(self, task: int | None) -> list[Lengths]:
        """The lengths of a direction in each model, if all models have some."""
        known = [model[task or 0] for model in self.models]
        return known if all(lengths.bins for lengths in known) else []


@dataclass(frozen=True)
class SourceLines:
    """Lines to translate, with all that decides how they become segments."""

    lines: Sequence[str]
    directions: Directions | None = None
    """Required for a model trained on several."""
    documents: Documents | None = None
    """The documents whose lines are translated together."""
    trained_on: TrainedOn = TrainedOn()
    """It limits the length of a segment and of its translation."""
    numbers: Sequence[int] | None = None
    """The numbers of the lines among all that are translated, from 0, which seed sampling; None: the indices."""
    prefixes: Sequence[str] | None = None
    """The text with which the translation of each line must begin, which may be empty; None: none is given."""
    glossary: Glossary | None = None
    """Terms that translations must contain; not for joined lines."""

    @classmethod
    def of(cls, lines: "SourceLines | Sequence[str]") -> "SourceLines":
        """The lines, to translate one by one if nothing else is known of them."""
        return lines if isinstance(lines, SourceLines) else cls(lines)

    def targets(self) -> Sequence[str | None]:
        """The target language of each line, if it is known."""
        return [None] * len(self.lines) if self.directions is None else self.directions.targets_of_lines()

    def at(self, rows: Sequence[int]) -> "SourceLines":
        """Some of the lines, with their numbers."""
        return SourceLines(
            [self.lines[row] for row in rows],
            self.directions and self.directions.at(rows),
            self.documents and self.documents.at(rows),
            self.trained_on,
            [row if self.numbers is None else self.numbers[row] for row in rows],
            self.prefixes and [self.prefixes[row] for row in rows],
            self.glossary,
        )


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
        """The target pieces of the context's lines, EOS included, after the last line without a translation."""
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
        """The task of a line, if there are several."""
        return None if self._tasks is None else int(self._tasks[line])

    def tag(self, line: int) -> list[int]:
        """The piece that precedes a line, if the tokenizer has one for its direction; otherwise empty."""
        return [self._tags[self.task(line) or 0]] if self._tags else []

    def segment(self, line: int, pieces: Sequence[int], part: int = 0) -> Segment:
        """The segment of these pieces of text, truncated at the limit of the model."""
        return Segment(line, part, [*self.tag(line), *pieces[: self.longest], EOS], self.task(line))

    def segments(self, numbers: Iterable[int]) -> Iterator[Segment]:
        """The segments of the lines with these numbers: none for a blank line, several for a line that is split."""
        for number in numbers:
            for part, (text, pieces) in enumerate(self.parts(number)):
                segment = self.segment(number, pieces, part)
                yield segment if self._glossary is None else replace(segment, terms=self._glossary.terms(text))

    def parts(self, number: int) -> list[tuple[str, list[int]]]:
        """The texts into which a line is split, or the line itself, each with its pieces; none of a blank line.

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
        """The lines to translate together: neighbours in a document, with `Documents.context` lines before them.

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
        """The pieces that a line takes among joined lines, with its tag and a break."""
        return 1 + len(self.tag(number)) + len(self.encoded[number])

    def _context(self, before: Sequence[int], room: int) -> list[int]:
        """The last of the lines `before`, as many as are wanted and fit into that number of pieces."""
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
    """The text and the pieces, with EOS, of each line in a joint translation.

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


def source_budget(prepared: Prepared) -> int | None:
    """The maximum number of source pieces of joined lines; None: no lines are joined.

    Training rows keep to the budget on both sides. In translation only the source is known, so the maximum is lower
    if targets are longer on average, to keep translations about as long as in training. Of several directions, the
    one with the longest targets decides.
    """
    if prepared.settings.documents is None:
        return None
    pieces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for corpus in prepared.record["sides"]["train"]["corpora"]:
        pieces[corpus["direction"]].update(corpus["pieces"])
    ratio = min((counts["source"] / counts["target"] for counts in pieces.values() if counts["target"]), default=1.0)
    return max(1, int(prepared.settings.documents.pieces * min(1.0, ratio)))


def ids_by_blank_lines(lines: Sequence[str]) -> list[int]:
    """The document id of each line, if blank lines separate documents."""
    return list(accumulate(int(not line.strip()) for line in lines))
