"""The built-in corpus: a synchronous grammar, English to German, drawn from a seed.

Every source has exactly one right target: the English words determine the German gender, case, tense and verb position.
So a model that has learned the grammar can reach 100 BLEU. Word-by-word lookup, which models neither agreement nor word
order, scores far lower.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice

from mtkit.data.grammar.documents import Author
from mtkit.data.grammar.sentences import GrammarSegment, Writer
from mtkit.recipe.data import Grammar

LONG = 0.02
"""If lengths differ, this share of the training documents is a tenth longer than the other sides' documents:
`translate` then treats lines of that length as usual, and does not split them."""


def corpus(settings: Grammar) -> dict[str, Callable[[], Iterator[GrammarSegment]]]:
    """Return the sides train, valid and test, each a function that iterates over its segments from the start.

    Sources of test and valid are distinct and not in train. Raises nothing; the training side is not held in memory.
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
    """Yield segments of a side without end: sentences, or documents if `settings.sentences` is above 1."""
    random_ = random.Random(f"{settings.seed} {side}")
    writer, author = Writer(random_), Author(random_)
    fewest = settings.fewest if side == "train" else None
    while True:
        count = settings.sentences if fewest is None else _length(random_, fewest, settings.sentences)
        yield writer.segment() if settings.sentences == 1 else author.segment(count)


def _length(random_: random.Random, fewest: int, most: int) -> int:
    """Draw the number of sentences of a training document: usually few, sometimes more than `most`.

    Documents of 1 to 2 sentences hold as many sentences in total as documents of 2 to 4, of 4 to 8 and so on.
    """
    if random_.random() < LONG:
        return most + -(-most // 10)
    return int(1 / (1 / fewest - random_.random() * (1 / fewest - 1 / (most + 1))))
