"""Documents of the built-in corpus: sentences about things that later sentences call "it".

German uses er, sie or es, by the gender of the noun that "it" refers to. That noun may be several sentences back, and
the sentence has no other clue. "It" always refers to the thing introduced last ("Anna bought a lamp."): the sentences
between name no other single thing. So each document has one right translation, which needs its context.
"""

import random

from mtkit.data.grammar import lexicon
from mtkit.data.grammar.clauses import Being, Clause, sentence
from mtkit.data.grammar.lexicon import Noun
from mtkit.data.grammar.phrases import name, noun_phrase, pronoun
from mtkit.data.grammar.sentences import GrammarSegment, Writer


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
