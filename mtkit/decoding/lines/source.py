"""Lines to translate, with all that decides how they become segments: directions, documents, learned lengths."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Self

from mtkit.data.lengths import Lengths
from mtkit.data.prepared import Prepared
from mtkit.decoding.glossary import Glossary
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.characters import is_blank
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import BREAK


@dataclass(frozen=True)
class Directions:
    """The direction of each line."""

    names: Sequence[str]
    """The directions that the model was trained on, as en-fr, in its order."""
    tasks: Sequence[int]
    """For each line, the index of its direction."""

    @classmethod
    def alike(cls, names: Sequence[str], chosen: str | None, lines: int) -> Self:
        """Return the same direction for all lines; None: the only one.

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
        """Return the same directions for a model that supports these; two single directions match whatever their names.

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
        """Return the directions of some lines."""
        return Directions(self.names, [self.tasks[row] for row in rows])

    def names_of_lines(self) -> list[str]:
        """Return the direction of each line by name."""
        return [self.names[task] for task in self.tasks]

    def targets_of_lines(self) -> list[str]:
        """Return the target language of each line."""
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
        """Return the same documents with the numbers of pieces and context lines of these settings."""
        return replace(self, pieces=settings.document_pieces or self.pieces, context=settings.context)

    def at(self, rows: Sequence[int]) -> "Documents":
        """Return the documents of some lines."""
        return replace(self, ids=[self.ids[row] for row in rows])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Usual:
    """The amount of text that a model has learned to translate at once."""

    sentences: int | None
    """Maximum number; None if any number is usual."""
    pieces: int
    """Maximum number, tag and end of the segment counted."""


@dataclass(frozen=True)
class TrainedOn:
    """The lengths of the training pairs, for one model or for each model of an ensemble."""

    models: Sequence[Sequence[Lengths]] = ()
    """For each model, the lengths in each direction; empty if the lengths of one model are unknown."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """Return the lengths of these runs; unknown if a run was imported. Raises: RunError."""
        known = [run.lengths for run in runs if run.lengths is not None]
        return cls(known if len(known) == len(runs) else ())

    @property
    def fingerprint(self) -> str:
        """A hash of the lengths."""
        text = "\n".join(lengths.model_dump_json() for model in self.models for lengths in model)
        return hashlib.sha256(f"{len(self.models)}\n{text}".encode()).hexdigest()

    def limits(self, pieces: Sequence[int], task: int | None, most: int | None = None) -> list[int]:
        """Return the maximum pieces of each line in a segment's translation, with the break or EOS at its end.

        It is `most` if given, else `Lengths.limit` of the training pairs of the direction (the largest in an ensemble),
        and at least twice the pieces of the line and 20: text unlike the training data, such as a line of numbers, may
        have longer translations than any pair.
        """
        sizes = [len(list(line)) + 1 for is_break, line in groupby(pieces, BREAK.__eq__) if not is_break]
        sizes[-1:] = [size - 1 for size in sizes[-1:]]  # the last line contains the end of the segment already
        known = self._of(task)
        return [most or max([2 * size + 20, *(lengths.limit(size) or 0 for lengths in known)]) for size in sizes]

    def limit(self, pieces: Sequence[int], task: int | None, longest: int | None, most: int | None = None) -> int:
        """Return how many pieces a segment's translation may have: the sum of `limits`.

        It never exceeds `longest`, the limit of the model.
        """
        limit = sum(self.limits(pieces, task, most))
        return limit if longest is None else min(limit, longest)

    def usual(self, task: int | None) -> Usual | None:
        """Return the usual amount of text in a line of the training sides of a direction; None if unknown.

        It also limits lines of models trained on documents: those learned sentences joined by breaks, which a line of
        several sentences lacks.
        """
        known = self._of(task)
        counted = [lengths.sentences_at_once for lengths in known if lengths.sentences_at_once is not None]
        if not known:
            return None
        return Usual(min(counted, default=None), min(lengths.pieces_at_once for lengths in known))

    def _of(self, task: int | None) -> list[Lengths]:
        """Return the lengths of a direction in each model, if all models have some."""
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
        """Return the lines, to translate one by one if nothing else is known of them."""
        return lines if isinstance(lines, SourceLines) else cls(lines)

    def targets(self) -> Sequence[str | None]:
        """Return the target language of each line, if it is known."""
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


def source_budget(prepared: Prepared) -> int | None:
    """Return the maximum number of source pieces of joined lines; None: no lines are joined.

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
    """Return the document id of each line, if blank lines separate documents."""
    return list(accumulate(map(is_blank, lines), initial=0))[1:]
