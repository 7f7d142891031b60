"""Limits from the lengths of training pairs: the maximum length of a translation, and the usual amount of text."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mtkit.data.lengths import Lengths
from mtkit.runs import Run
from mtkit.text.tokenizer import BREAK


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
