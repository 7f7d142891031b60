"""Segments, the units of translation: a line, a part of a line of unusual length, or several lines of a document."""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from operator import ne

from mtkit.data.lengths import Lengths
from mtkit.data.prepared import Prepared
from mtkit.decoding.lines.splitting import parted, split
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.runs import Run
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer


@dataclass(frozen=True)
class Usual:
    """The amount of text that a model has learned to translate at once."""

    sentences: int | None
    """At most; None for any number, or where those of its training lines were not counted."""
    pieces: int
    """At most, tag and end of the segment counted."""


@dataclass(frozen=True)
class TrainedOn:
    """The lengths of the training pairs of a model, or of the models of an ensemble."""

    models: Sequence[Sequence[Lengths]] = ()
    """Of each model, those of each direction; none at all where one is not known."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "TrainedOn":
        """The lengths of these runs; runs of earlier versions have none. Raises: RunError."""
        known = [run.lengths for run in runs if run.lengths is not None]
        return cls(known if len(known) == len(runs) else ())

    @property
    def fingerprint(self) -> str:
        """A hash of the lengths."""
        text = "\n".join(each.model_dump_json() for model in self.models for each in model)
        return hashlib.sha256(f"{len(self.models)}\n{text}".encode()).hexdigest()

    def limit(self, pieces: Sequence[int], task: int | None, longest: int | None, most: int | None = None) -> int:
        """The maximum number of pieces of the translation of a segment, EOS counted.

        It is `most` if given, else `Lengths.limit` of the training pairs of the direction (the largest in an ensemble),
        and at least twice the pieces of the source and 20: text unlike the training data, such as a line of numbers,
        may have longer translations than any pair. Lines joined by breaks have a limit each. The maximum never exceeds
        `longest`, the limit of the model.
        """
        lines = [len(list(line)) + 1 for is_break, line in groupby(pieces, BREAK.__eq__) if not is_break]
        lines[-1:] = [each - 1 for each in lines[-1:]]  # the end of the segment is there already
        if most is not None:
            limit = most * len(lines)
        else:
            known = self._known(task)
            told = sum(max((each.limit(line) or 0 for each in known), default=0) for line in lines)
            limit = max(told, 2 * len(pieces) + 20)
        return limit if longest is None else min(limit, longest)

    def usual(self, task: int | None) -> Usual | None:
        """The usual amount in a line of all training sides of a direction; None where unknown.

        It holds for models trained on documents too: the lines that these are of are joined by breaks, which a line of
        several sentences lacks.
        """
        known = self._known(task)
        counted = [each.sentences_at_once for each in known if each.sentences_at_once is not None]
        return Usual(min(counted, default=None), min(each.pieces_at_once for each in known)) if known else None

    def _known(self, task: int | None) -> list[Lengths]:
        """The lengths of a direction in each model, if all models have some."""
        known = [model[task or 0] for model in self.models]
        return known if all(each.bins for each in known) else []


UNSEEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})
"""Unicode's categories of white space, controls and format marks, as zero-width spaces and byte order marks."""


def is_blank(line: str) -> bool:
    """Whether a line shows nothing: it holds nothing but white space and characters that are not seen."""
    return all(unicodedata.category(each) in UNSEEN for each in line)


@dataclass(frozen=True)
class Segment:
    """A unit of translation."""

    line: int
    """Index of its line, from 0; of several lines, of the first."""
    part: int
    """Index of the part in its line, from 0."""
    pieces: list[int]
    """Source pieces, after the tag of the direction where there are several, EOS at the end."""
    task: int | None = None
    """Index of the direction, where there are several."""


@dataclass(frozen=True)
class Directions:
    """The direction of each line."""

    names: Sequence[str]
    """What the model was trained on, as en-fr, in its order."""
    tasks: Sequence[int]
    """For each line, the index of its direction."""

    @classmethod
    def alike(cls, names: Sequence[str], chosen: str | None, lines: int) -> "Directions":
        """The same direction for all lines; None: the only one.

        Raises: MtkitError for an unknown direction, and for None where there are several; the message lists them.
        """
        listed = ", ".join(names)
        if chosen is None and len(names) > 1:
            raise MtkitError(f"the run was trained on several directions; choose one with --direction: {listed}")
        if chosen is not None and chosen not in names:
            hint = did_you_mean(chosen, list(names))
            raise MtkitError(f"the run was not trained on the direction {shown(chosen)}{hint}; it knows: {listed}")
        return cls(names, [0 if chosen is None else names.index(chosen)] * lines)

    def among(self, known: Sequence[str]) -> "Directions":
        """The same directions for a model with these ones; a single direction on either side matches by itself.

        Raises: MtkitError for a line whose direction the model does not have.
        """
        if len(known) == len(self.names) == 1:
            return Directions(known, self.tasks)
        for name in dict.fromkeys(self.names_of_lines()):
            if name not in known:
                raise MtkitError(f"there are lines of the direction {name}, and the run knows: {', '.join(known)}")
        return Directions(known, [known.index(name) for name in self.names_of_lines()])

    def part(self, first: int, lines: int) -> "Directions":
        """The directions of a range of lines, from number `first` on."""
        return Directions(self.names, self.tasks[first : first + lines])

    def names_of_lines(self) -> list[str]:
        """The direction of each line by name."""
        return [self.names[task] for task in self.tasks]

    def targets_of_lines(self) -> list[str]:
        """The target language of each line."""
        targets = [languages_of(name)[1] for name in self.names]
        return [targets[task] for task in self.tasks]


class Source:
    """The conversion of source lines to pieces: their tags and maximum length."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        longest: int | None,
        directions: Directions | None,
        trained_on: TrainedOn | None = None,
    ) -> None:
        """`longest` is the maximum number of pieces of the model, tag and EOS counted."""
        self._tokenizer, self._usual = tokenizer, cache((trained_on or TrainedOn()).usual)
        self._languages = [languages_of(name)[0] for name in directions.names] if directions is not None else [None]
        self._directions = directions if directions is not None and len(directions.names) > 1 else None
        self._tags = [] if directions is None else tokenizer.tags(directions.names)
        self.longest = None if longest is None else longest - 1 - bool(self._tags)
        """Pieces of text that the model takes at most."""

    def task(self, line: int) -> int | None:
        """The task of a line, if there are several."""
        return None if self._directions is None else int(self._directions.tasks[line])

    def tag(self, line: int) -> list[int]:
        """The piece that precedes a line, if the tokenizer has one for its direction; otherwise empty."""
        return [self._tags[self.task(line) or 0]] if self._tags else []

    def segment(self, line: int, pieces: Sequence[int], part: int = 0) -> Segment:
        """The segment of these pieces of text, truncated at the limit of the model."""
        return Segment(line, part, [*self.tag(line), *pieces[: self.longest], EOS], self.task(line))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The pieces of each line; a blank line has none."""
        encoded = self._tokenizer.encode_lines(lines)
        return [[] if is_blank(line) else pieces for line, pieces in zip(lines, encoded, strict=True)]

    def whole(self, lines: Sequence[str], encoded: Sequence[list[int]]) -> list[list[int]]:
        """The pieces of the lines that are translated as they are; none of a line that is blank or split."""
        return [
            pieces if len(self.parts(line, pieces, number)) == 1 else []
            for number, (line, pieces) in enumerate(zip(lines, encoded, strict=True))
        ]

    def segments(self, lines: Sequence[str], encoded: Sequence[list[int]], which: Iterable[int]) -> Iterator[Segment]:
        """The segments of the lines of these numbers: none of a blank line, several of a line that is split."""
        for number in which:
            for part, (_, pieces) in enumerate(self.parts(lines[number], encoded[number], number)):
                yield self.segment(number, pieces, part)

    def parts(self, line: str, pieces: list[int], number: int) -> list[tuple[str, list[int]]]:
        """The texts into which a line of these pieces is split, or the line itself, each with its pieces.

        They stand in the line in this order; white space between them may be left out. A blank line has none.
        """
        if not pieces:
            return []
        texts = self._parts(line, len(pieces), self.task(number))
        parts = self._tokenizer.encode_lines(texts) if len(texts) > 1 else [pieces]
        return [(text, part) for text, part in zip(texts, parts, strict=True) if part]

    def _parts(self, line: str, pieces: int, task: int | None) -> list[str]:
        """The parts into which a line of this number of pieces is split, or the line itself."""

        def count(texts: Sequence[str]) -> list[int]:
            return [len(each) for each in self._tokenizer.encode_lines(texts)]

        language, texts, usual = self._languages[task or 0], [line], self._usual(task)
        if usual is not None:
            room = usual.pieces - 1 - len(self._tags[:1])
            texts = parted(line, language, count, most=usual.sentences, pieces=room)
        if self.longest is None or (len(texts) == 1 and pieces <= self.longest):
            return texts
        return [part for text in texts for part in split(text, self.longest, count, language)]


@dataclass(frozen=True)
class Documents:
    """The lines that belong together, and the amount of them that is translated at once."""

    ids: Sequence[int] | Sequence[str]
    """For each line, the id of its document; a new document begins where the id changes."""
    pieces: int
    """Source pieces that joined lines may have at most, breaks counted."""

    def groups(self, source: Source, encoded: Sequence[list[int]]) -> Iterator[list[int]]:
        """The numbers of the lines to translate together: groups of at least two neighbours in a document.

        Lines without pieces, blank or split (`Source.whole`), are in no group. A group stays within the limits of the
        documents and of the model.
        """
        budget = self.pieces if source.longest is None else min(self.pieces, source.longest)
        real = (number for number, pieces in enumerate(encoded) if pieces)
        # a document ends where the id changes, be it on a blank line alone
        documents = list(accumulate(map(ne, self.ids, self.ids[1:]), initial=0))
        for _, document in groupby(real, key=lambda number: (documents[number], source.task(number))):
            group: list[int] = []
            size = 0
            for number in document:
                size += 1 + len(source.tag(number)) + len(encoded[number])
                if group and size > budget:
                    yield from _several(group)
                    group = []
                if not group:
                    size = len(encoded[number])
                group.append(number)
            yield from _several(group)


def join_lines(source: Source, encoded: Sequence[list[int]], group: Sequence[int]) -> Segment:
    """The lines of a group as one segment, each with its tag, separated by breaks."""
    pieces = list(encoded[group[0]])
    for number in group[1:]:
        pieces += [BREAK, *source.tag(number), *encoded[number]]
    return source.segment(group[0], pieces)


def split_lines(tokenizer: Tokenizer, pieces: Sequence[int], lines: int) -> list[tuple[str, tuple[int, ...]]] | None:
    """The text and the pieces, with EOS, of each line of a joint translation.

    None where the translation does not separate into as many lines, or one of them is empty.
    """
    parts: list[list[int]] = [[]]
    for piece in pieces:
        if piece == BREAK:
            parts.append([])
        elif piece != EOS:
            parts[-1].append(piece)
    found = [(tokenizer.decode(part), (*part, EOS)) for part in parts]
    return found if len(found) == lines and all(text.strip() for text, _ in found) else None


def source_budget(prepared: Prepared) -> int | None:
    """The maximum number of source pieces of joined lines; None: no lines are joined.

    Training rows keep to the budget on both sides. In translation only the source is known, so the maximum is lower
    where targets are longer on average, to keep translations about as long as in training. Of several directions the
    one with the longest targets decides.
    """
    if prepared.settings.documents is None:
        return None
    pieces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for corpus in prepared.record["sides"]["train"]["corpora"]:
        pieces[corpus["direction"]].update(corpus["pieces"])
    ratio = min((each["source"] / each["target"] for each in pieces.values() if each["target"]), default=1.0)
    return max(1, int(prepared.settings.documents.pieces * min(1.0, ratio)))


def ids_by_blank_lines(lines: Sequence[str]) -> list[int]:
    """The document id of each line, where blank lines separate documents."""
    ids, document = [], 0
    for line in lines:
        document += not line.strip()
        ids.append(document)
    return ids


def _several(group: list[int]) -> Iterator[list[int]]:
    if len(group) > 1:
        yield group
