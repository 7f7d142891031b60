"""Documents in which the German of one sentence depends on a sentence a known distance back.

A document consists of sentences about people, an antecedent, and a later sentence whose translation depends on the
antecedent; see `mtkit.data.builtin.antecedents`. All other sentences are drawn independently of these two, and name no
thing, place or ambiguous term. So only the antecedent decides the translation of the later sentence.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtkit.data.builtin.antecedents import Dependency, Kind, draw_action, draw_dependency, draw_name
from mtkit.data.builtin.lexicon import Pair
from mtkit.data.builtin.task import BuiltinTask, Option, Words


@dataclass(frozen=True)
class Document:
    """Sentences with their translations; the translation of one of them depends on the antecedent."""

    sentences: tuple[Pair, ...]
    later: int
    """Index of the sentence whose translation depends on the antecedent."""
    distance: int
    """Sentences from the antecedent to the later one; 1: the next sentence."""
    dependency: Dependency

    @property
    def source(self) -> str:
        """The English text."""
        return " ".join(pair.english for pair in self.sentences)

    @property
    def target(self) -> str:
        """The German text."""
        return " ".join(pair.german for pair in self.sentences)

    def contrastive(self) -> dict[str, Any]:
        """Return the contrastive pair: the later sentence, right and wrong translations, and the sentences before."""
        context = self.sentences[: self.later]
        return {
            "source": self.dependency.later.english,
            "right": self.dependency.later.german,
            "wrong": list(self.dependency.wrong),
            "source_context": [pair.english for pair in context],
            "target_context": [pair.german for pair in context],
            "labels": {"kind": self.dependency.kind, "distance": self.distance},
        }


def draw_document(random_: random.Random, kinds: Sequence[Kind], distance: int, around: int) -> Document:
    """Draw a document with the antecedent `distance` sentences before the sentence that depends on it.

    Up to `around` sentences precede the antecedent, and up to `around` follow the later sentence.
    """
    dependency = draw_dependency(random_.choice(kinds), random_)
    before, after = random_.randint(0, around), random_.randint(0, around)

    def asides(count: int) -> list[Pair]:
        return [draw_action(random_)(draw_name(random_)) for _ in range(count)]

    sentences = (*asides(before), dependency.antecedent, *asides(distance - 1), dependency.later, *asides(after))
    return Document(sentences, before + distance, distance, dependency)


@dataclass(frozen=True)
class DocumentTask(BuiltinTask):
    """A task whose segments are the sentences of documents. Its lengths are distances, and double from the minimum on.

    The held-out documents of a distance are a test side of their own. `generate` draws a document as one segment.
    """

    kinds: Sequence[Kind] = ()

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Default settings of the sections of `data`."""
        return {
            "task": {"valid": 100, "test": 200, "longer": ()},
            "documents": {"pieces": 1000, "whole": True},
            "cleaning": {"overlap": False},  # short sentences recur in all sides, and documents need all of theirs
        }

    def draw(self, random_: random.Random, options: Mapping[str, Any], distances: Sequence[int]) -> Document:
        """Draw a document with one of the distances."""
        return draw_document(random_, self.kinds, random_.choice(distances), options["around"])


def side_distances(shortest: int, longest: int, longer: Sequence[int]) -> dict[str, Sequence[int]]:
    """Return the distances of each side: training and validation have several, a test side has one."""

    def doubled() -> Iterator[int]:
        distance = shortest
        while distance <= longest:
            yield distance
            distance *= 2

    trained = list(doubled())
    tested = sorted({*trained, *(multiple * longest for multiple in longer)})
    return {"train": trained, "valid": trained, **{f"distance-{distance}": [distance] for distance in tested}}


MOST = 1_000
"""Maximum distance."""


def _task(name: str, summary: str, probes: str, *kinds: Kind) -> DocumentTask:
    def generate(random_: random.Random, options: Mapping[str, Any], distance: int) -> tuple[Words, Words]:
        document = draw_document(random_, kinds, distance, options["around"])
        return document.source.split(), document.target.split()

    return DocumentTask(
        name,
        summary,
        generate,
        (1, 32),
        "sentences back",
        probes,
        {"around": Option(4, "Maximum sentences before the antecedent, and after the dependent one.", 0, 100)},
        check=lambda options, longest: f"a distance is at most {MOST:,} sentences" if longest > MOST else None,
        languages=("en", "de"),
        tokenizer={"kind": "bpe", "vocabulary": 1000},
        kinds=kinds,
    )


TASKS = (
    _task("pronouns", 'Translate "it" and "they" by the gender of a noun.', "context at known distances", "pronoun"),
    _task("names", "Spell a name as at its first mention.", "context at known distances", "name"),
    _task("terms", "Translate an ambiguous noun by its first mention.", "context at known distances", "term"),
    _task(
        "discourse",
        "Documents of the tasks pronouns, names and terms.",
        "context at known distances",
        "pronoun",
        "name",
        "term",
    ),
)
"""The tasks of this module."""
