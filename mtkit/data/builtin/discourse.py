"""Documents in which the German of one sentence depends on a sentence a known distance back.

A document consists of sentences about people, an antecedent, and a later sentence whose translation depends on the
antecedent; see `mtkit.data.builtin.antecedents`. All other sentences are drawn independently of these two, and name no
thing, place or ambiguous term. So only the antecedent decides the translation of the later sentence.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtkit.data.builtin.antecedents import Dependency, Kind, draw_action, draw_dependency, draw_name
from mtkit.data.builtin.lexicon import Pair


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
