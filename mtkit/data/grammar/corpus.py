"""The built-in corpus: a synchronous grammar, English to German, drawn from a seed.

Every source has exactly one right target: whatever German needs to know (gender, case, tense, where the verb goes) is
fixed by the English words. So a model that has understood the grammar can reach 100 BLEU, and word-by-word lookup,
which knows neither agreement nor order, stays far below.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice

from mtkit.data.grammar.documents import Author
from mtkit.data.grammar.sentences import GrammarSegment, Writer
from mtkit.recipe.data import Grammar

LONG = 0.02
"""Where lengths differ, this share of the training documents is a tenth longer than the other sides' documents:
`translate` then counts lines of that length as usual, and does not split them."""


def corpus(settings: Grammar) -> dict[str, Callable[[], Iterator[GrammarSegment]]]:
    """The sides train, valid and test, each a function that draws its segments anew, one by one.

    No source of test or valid is drawn twice, or for training. Raises nothing; needs no memory for the training side.
    """

    def held_out(side: str, size: int, taken: set[str]) -> list[GrammarSegment]:
        segments = []
        for segment in draws(settings, side):
            if segment.source not in taken:
                taken.add(segment.source)
                segments.append(segment)
                if len(segments) == size:
                    return segments
        raise AssertionError("draws never end")

    taken: set[str] = set()
    test = held_out("test", settings.test, taken)
    valid = held_out("valid", settings.valid, taken)

    def train() -> Iterator[GrammarSegment]:
        return islice((each for each in draws(settings, "train") if each.source not in taken), settings.train)

    return {"train": train, "valid": lambda: iter(valid), "test": lambda: iter(test)}


def draws(settings: Grammar, side: str) -> Iterator[GrammarSegment]:
    """Endless segments of a side: sentences, or documents where `settings.sentences` is above 1."""
    random_ = random.Random(f"{settings.seed} {side}")
    writer, author = Writer(random_), Author(random_)
    fewest = settings.fewest if side == "train" else None
    while True:
        count = settings.sentences if fewest is None else _length(random_, fewest, settings.sentences)
        yield writer.segment() if settings.sentences == 1 else author.segment(count)


def _length(random_: random.Random, fewest: int, most: int) -> int:
    """The sentences of a training document: mostly few, now and then more than `most`.

    As many sentences in all lie in documents of 1 to 2 sentences as in those of 2 to 4, of 4 to 8 and so on.
    """
    if random_.random() < LONG:
        return most + -(-most // 10)
    return int(1 / (1 / fewest - random_.random() * (1 / fewest - 1 / (most + 1))))
