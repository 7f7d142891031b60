"""Segments, the units of translation: a line, a part of a line of unusual length, or several lines of a document."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from mtkit.decoding.lines.limits import TrainedOn
from mtkit.decoding.lines.splitting import parted, split
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import EOS, Tokenizer

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
