"""Random clauses and noun phrases of the built-in corpus."""

import random
from typing import TypeVar

from mtkit.data.builtin import lexicon
from mtkit.data.builtin.grammar import NOTHING, POSSESSIVES, Clause, Phrase, both, name, noun_phrase, owned, pronoun
from mtkit.data.builtin.lexicon import Pair, Verb

Item = TypeVar("Item")

_PRONOUNS = ("I", "I", "I", "you", "you", "you", "he", "she", "we", "they")
"""Pronoun subjects; verb forms of I and you would otherwise be the rarest."""


class Clauses:
    """Draws clauses and their parts, and records their constructions.

    With `things` False, they contain no inanimate singular nouns and no places.
    """

    def __init__(self, random_: random.Random, things: bool = True) -> None:
        self._random, self._things = random_, things
        self._used: set[str] = set()

    def clause(
        self,
        *,
        subject: Phrase | None = None,
        kind: str | None = None,
        final: bool = False,
        negation: float = 0.2,
        time: float = 0.3,
        frequency: float = 0.15,
        place: bool = True,
        tenses: tuple[str, ...] = ("past", "present", "modal"),
    ) -> Clause:
        """Draw a clause; `final`: its verb comes last; the numbers are the probabilities of each part."""
        subject = subject or self.subject()
        kinds = {"thing": 33, "person": 27, "giving": 11 if self._things else 0, "alone": 26}
        kinds["motion"] = 10 if self._things and place else 0
        kind = kind or self._random.choices(list(kinds), list(kinds.values()))[0]
        verb = self._pick(lexicon.VERBS[kind])
        tense = self._tense(subject, verb, final, tenses)
        negated = tense not in {"must", "like"} and self._chance(negation)
        often = NOTHING if negated or not self._chance(frequency) else self._pick(lexicon.FREQUENCIES)
        when = NOTHING
        if often is NOTHING and time and self._chance(max(time, 0.6 if kind == "alone" else 0.0)):
            when = self.time(tense)
        where = NOTHING
        if kind == "motion":
            where = self._direction()
        elif place and self._things and self._chance(0.15):
            where = self._place()
        if verb.prefix:
            form = tense if tense in {"past", "present"} else "infinitive"
            self._use(f"separable {'final' if final else 'main'} {form}")
        self._use(f"{tense}{' negated' if negated else ''}")
        recipient = self._person(subject) if kind == "giving" else None
        thing = None
        if kind in {"thing", "giving"}:
            thing = self._thing(negated)
        elif kind == "person":
            thing = self._person(subject)
            self._use(f"{verb.case} object")
        return Clause(subject, verb, tense, thing, recipient, negated, often, when, where)

    def time(self, tense: str) -> Pair:
        """Draw an adverbial of time for a tense."""
        self._use("time")
        epoch = {"past": "past", "present": "present", "like": "present"}.get(tense, "future")
        return self._pick(self._pick((lexicon.TIMES[epoch], lexicon.DAYS, lexicon.HOURS)))

    def _tense(self, subject: Phrase, verb: Verb, final: bool, tenses: tuple[str, ...]) -> str:
        ich_or_du = subject.person < 3 and not subject.plural
        # their forms differ between verbs, and are frequent enough only if the present is favoured
        tense = self._pick(("present",) * 3 + tenses if ich_or_du and "present" in tenses else tenses)
        if tense == "modal":
            tense = self._pick(("will", "can", "must", "should", "want", "like"))
        # forms of ich and du joined to the prefix, "anrufst", "mitbringe", would be too rare
        return "past" if tense in {"present", "like"} and final and verb.prefix and ich_or_du else tense

    # noun phrases

    def subject(self, pronouns: tuple[str, ...] = _PRONOUNS) -> Phrase:
        """Draw a subject: a person, several, a name or a pronoun."""
        kind = self._random.random()
        if kind < 0.38:
            return pronoun(self._pick(pronouns))
        if kind < 0.55:
            return name(self._pick((*lexicon.WOMEN, *lexicon.MEN)))
        if kind < 0.60:
            self._use("names joined")
            return both(*self._random.sample((*lexicon.WOMEN, *lexicon.MEN), 2))
        return self._people()

    def _person(self, subject: Phrase) -> Phrase:
        """Draw a person as an object; never the subject itself."""
        kind = self._random.random()
        if kind < 0.3:
            reflexive = {1: {"I", "we"}, 2: {"you"}}.get(subject.person if subject.pronoun else 3, set())
            self._use("pronoun object")
            words = ("I", "you", "he", "she", "we", "they")
            return pronoun(self._pick([word for word in words if word not in reflexive]))
        if kind < 0.45:
            names = (*lexicon.WOMEN, *lexicon.MEN)
            return name(self._pick([text for text in names if text not in subject.subject]))
        return self._people(singular=("the", *POSSESSIVES))

    def _people(self, singular: tuple[str, ...] = ("the", "the", "a", "a", *POSSESSIVES)) -> Phrase:
        noun, adjective = self._pick(lexicon.PEOPLE), self._sometimes(lexicon.PERSONAL)
        if self._chance(0.3):
            self._use("people")
            number = self._pick(lexicon.NUMBERS) if self._chance(0.5) else None
            return noun_phrase(noun, "the", adjective=adjective, plural=True, number=number)
        determiner = self._pick(singular)
        self._use(f"person {'possessive' if determiner in POSSESSIVES else determiner}")
        return noun_phrase(noun, determiner, adjective=adjective)

    def _thing(self, negated: bool) -> Phrase:
        noun, adjective = self._pick(lexicon.THINGS), self._sometimes(lexicon.MATERIAL)
        if not self._things or self._chance(0.35):
            if negated:
                self._use("no things")
                return noun_phrase(noun, "no", adjective=adjective, plural=True)
            self._use("number")
            return noun_phrase(noun, "", adjective=adjective, plural=True, number=self._pick(lexicon.NUMBERS))
        if self._chance(0.15):
            self._use("owner")
            return owned(self._pick(lexicon.PEOPLE), noun)
        determiner = self._pick(("the", "the", "a", "a", *POSSESSIVES))
        if negated and determiner == "a":
            determiner = "no"
        self._use(f"thing {'possessive' if determiner in POSSESSIVES else determiner}")
        return noun_phrase(noun, determiner, adjective=adjective)

    def _place(self) -> Pair:
        if self._chance(0.6):
            room = self._pick(lexicon.ROOMS)
            self._use("in, dative")
            return Pair(f"in the {room.english}", f"{lexicon.IN[room.gender]} {room.german}")
        city = self._pick(lexicon.CITIES)
        return Pair(f"in {city.english}", f"in {city.german}")

    def _direction(self) -> Pair:
        if self._chance(0.6):
            room = self._pick(lexicon.ROOMS)
            self._use("into, accusative")
            return Pair(f"into the {room.english}", f"{lexicon.INTO[room.gender]} {room.german}")
        self._use("to a city")
        city = self._pick(lexicon.CITIES)
        return Pair(f"to {city.english}", f"nach {city.german}")

    # drawing

    def _pick(self, items: "tuple[Item, ...] | list[Item]") -> Item:
        return self._random.choice(items)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _sometimes(self, items: "tuple[Item, ...]") -> Item | None:
        return self._pick(items) if self._chance(0.4) else None

    def _use(self, construction: str) -> None:
        self._used.add(construction)
