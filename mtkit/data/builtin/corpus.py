"""The built-in corpus: sentences or documents of a synchronous grammar, English to German, drawn from a seed.

Every source has exactly one correct target: the English words determine the German gender, case, tense and verb
position. So a model that has learned the grammar can reach 100 BLEU. Word-by-word lookup, which models neither
agreement nor word order, scores far lower.

Sentences of documents refer to things as "it". German uses er, sie or es, by the gender of the noun, which may be
several sentences back; the sentence has no other clue. "It" always refers to the thing introduced last ("Anna bought a
lamp."): the sentences between name no other single thing. So the only correct translation requires the context.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice

from mtkit.data.builtin import lexicon
from mtkit.data.builtin.grammar import Being, Clause, name, noun_phrase, pronoun, sentence
from mtkit.data.builtin.lexicon import Noun
from mtkit.data.builtin.sentences import GrammarSegment, Writer
from mtkit.recipe.data import Grammar


class Author:
    """Draws documents whose later sentences refer back with "it"."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_
        self._writer = Writer(random_, things=False)

    def segment(self, sentences: int) -> GrammarSegment:
        """Draw a document of that many sentences, as one line for each language."""
        parts, used, thing, distance = [], set(), lexicon.THINGS[0], 0
        for index in range(sentences):
            kind = "bring in" if index == 0 else self._random.choices(("refer", "aside", "bring in"), (45, 40, 15))[0]
            if kind == "bring in":
                thing, distance = self._random.choice(lexicon.THINGS), 0
                parts.append(self._bring_in(thing))
                used.add("bring in")
                continue
            distance += 1
            if kind == "refer":
                parts.append(self._refer(thing))
                used.add(f"it after {min(distance, 4)}{' or more' if distance >= 4 else ''}")
            else:
                aside = self._writer.segment()
                parts.append((aside.source, aside.target))
                used |= aside.constructions
        return GrammarSegment(
            " ".join(source for source, _ in parts), " ".join(target for _, target in parts), frozenset(used)
        )

    def _bring_in(self, noun: Noun) -> tuple[str, str]:
        """Draw a sentence that introduces the noun, as "Anna found an old lamp on Monday." """
        pick = self._random.choice
        person = name(pick((*lexicon.WOMEN, *lexicon.MEN)))
        adjective = pick((None, None, *lexicon.MATERIAL))
        thing = noun_phrase(noun, "a", adjective=adjective)
        clause = Clause(person, pick(lexicon.VERBS["thing"]), "past", thing, time=self._writer.time("past"))
        return sentence(clause.english()), sentence(clause.german("main"))

    def _refer(self, noun: Noun) -> tuple[str, str]:
        """Draw a sentence with "it": a description, or an action with it as its object."""
        pick, it = self._random.choice, pronoun("it", noun.gender)
        if self._random.random() < 0.45:
            being = Being(it, pick(lexicon.MATERIAL), self._random.random() < 0.5, pick(lexicon.DEGREES[1:]))
            return sentence(being.english()), sentence(being.german("main"))
        tense = pick(("past", "present", "will", "want", "can", "should"))
        time = self._writer.time(tense)
        clause = Clause(self._writer.subject(), pick(lexicon.VERBS["thing"]), tense, it, time=time)
        if self._random.random() < 0.5:
            return (
                sentence(f"{time.english} {clause.english(time=False)}"),
                sentence(f"{time.german} {clause.german('inverted', time=False)}"),
            )
        return sentence(clause.english()), sentence(clause.german("main"))


LONG = 0.02
"""If lengths differ, this share of the training documents is a tenth longer than the other sides' documents:
`translate` then treats lines of that length as usual, and does not split them."""


def corpus(settings: Grammar) -> dict[str, Callable[[], Iterator[GrammarSegment]]]:
    """Return the sides train, valid and test, each a function that iterates over its segments from the start.

    Sources of test and valid are distinct and not in train. The training side is not held in memory.
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
        return islice((pair for pair in draws(settings, "train") if pair.source not in taken), settings.train)

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
    """Draw the number of sentences in a training document: usually few, sometimes more than `most`.

    Documents of 1 to 2 sentences hold as many sentences in total as documents of 2 to 4, of 4 to 8 and so on.
    """
    if random_.random() < LONG:
        return most + -(-most // 10)
    return int(1 / (1 / fewest - random_.random() * (1 / fewest - 1 / (most + 1))))
