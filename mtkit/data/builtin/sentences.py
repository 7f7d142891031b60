"""Random sentences of the built-in corpus, with one method per construction."""

import random
from dataclasses import dataclass, replace

from mtkit.data.builtin import lexicon
from mtkit.data.builtin.clauses import Clauses
from mtkit.data.builtin.grammar import NOTHING, POSSESSIVES, Being, Clause, noun_phrase, pronoun, sentence
from mtkit.data.builtin.lexicon import Pair

SHORTEST, LONGEST = 5, 16
"""Words of an English sentence."""


@dataclass(frozen=True)
class GrammarSegment:
    """A source with its only correct target, and the names of their constructions."""

    source: str
    target: str
    constructions: frozenset[str]


class Writer(Clauses):
    """Draws sentences, and records their constructions."""

    def __init__(self, random_: random.Random, things: bool = True) -> None:
        super().__init__(random_, things)
        self._kinds = [
            (26, self._statement),
            (12, self._question),
            (18, self._subordinate),
            (12, self._that),
            (9, self._relative),
            (8, self._coordination),
            (9, self._trying),
            (6, self._comparison if things else self._statement),
            (8, self._it if things else self._statement),
            (5, self._there if things else self._statement),
            (5, self._purpose if things else self._statement),
        ]

    def segment(self) -> GrammarSegment:
        """Draw a sentence of 5 to 16 English words."""
        kinds, weights = [kind for _, kind in self._kinds], [weight for weight, _ in self._kinds]
        while True:
            self._used = set()
            english, german, mark = self._random.choices(kinds, weights)[0]()
            if SHORTEST <= len(english.split()) <= LONGEST:
                return GrammarSegment(sentence(english, mark), sentence(german, mark), frozenset(self._used))

    # sentences: English, German, closing mark

    def _statement(self) -> tuple[str, str, str]:
        clause = self.clause(time=0.7)
        if clause.time is not NOTHING and self._chance(0.5):
            self._use("fronted time")
            english = f"{clause.time.english} {clause.english(time=False)}"
            return english, f"{clause.time.german} {clause.german('inverted', time=False)}", "."
        self._use("statement")
        return clause.english(), clause.german("main"), "."

    def _question(self) -> tuple[str, str, str]:
        word = self._pick((NOTHING, NOTHING, *lexicon.QUESTIONS))
        self._use(f"question {word.english or 'yes or no'}")
        if word.english:
            clause = self.clause(negation=0.0, time=0.5 * (word.english != "when"), place=word.english != "where")
        else:
            # few forms come first, and none of ich and du: with a capital, each would be too rare
            subject = self.subject(pronouns=("he", "she", "we", "they"))
            clause = self.clause(subject=subject, negation=0.0, time=0.5, tenses=("past", "can", "should", "want"))
        return f"{word.english} {clause.english(question=True)}", f"{word.german} {clause.german('inverted')}", "?"

    def _subordinate(self) -> tuple[str, str, str]:
        word = self._pick((*lexicon.CONJUNCTIONS, Pair("when", "")))
        epoch = "present" if word.english == "if" else self._pick(("past", "present"))
        if word.english == "when":
            word = Pair("when", "als" if epoch == "past" else "wenn")
        negation = 0.2 if word.english in {"because", "although"} else 0.0
        tenses = ("past",) if epoch == "past" else ("present", "modal")
        main = self.clause(time=0.0, place=False, frequency=0.0, tenses=tenses)
        # the past of ich or du may replace a present, see `_tense`
        reason = self.clause(final=True, negation=negation, time=0.2, tenses=(epoch,))
        self._use(f"{word.english} {word.german}")
        english, german = f"{word.english} {reason.english()}", f"{word.german} {reason.german('final')}"
        if self._chance(0.4):
            self._use("fronted clause")
            return f"{english}, {main.english()}", f"{german}, {main.german('inverted')}", "."
        return f"{main.english()} {english}", f"{main.german('main')}, {german}", "."

    def _that(self) -> tuple[str, str, str]:
        """Draw a clause after a verb of saying or asking."""
        asking = self._chance(0.25)
        verb = self._pick(lexicon.VERBS["asking" if asking else "saying"])
        word = Pair("whether", "ob") if asking else Pair("that", "dass")
        self._use(word.english)
        subject = self.subject()
        main = Clause(subject, verb, self._tense(subject, verb, False, ("present", "past")))
        content = self.clause(final=True, time=0.3)
        english = f"{main.english()} {word.english} {content.english()}"
        return english, f"{main.german('main')}, {word.german} {content.german('final')}", "."

    def _relative(self) -> tuple[str, str, str]:
        """Draw somebody who does something, or something that somebody does something to."""
        if self._things and self._chance(0.4):
            self._use("relative that")
            verb, noun = self._pick(lexicon.VERBS["thing"]), self._pick(lexicon.THINGS)
            thing = noun_phrase(noun, "the", plural=self._chance(0.25))
            inner = Clause(self.subject(), verb, "past")
            head = thing.who(f"that {inner.english()}", f"{thing.relative(verb.case)} {inner.german('final')}")
            being = Being(head, self._pick(lexicon.MATERIAL), self._chance(0.4), self._pick(lexicon.DEGREES))
            return being.english(), being.german("main"), "."
        self._use("relative who")
        person = noun_phrase(self._pick(lexicon.PEOPLE), "the", plural=self._chance(0.25))
        inner = self.clause(subject=person, final=True, time=0.0, frequency=0.0)
        head = person.who(
            f"who {inner.english_predicate()}", f"{person.relative('nominative')} {inner.german_predicate()}"
        )
        outer = self.clause(subject=head, time=0.0, place=False, negation=0.1)
        return outer.english(), outer.german("main"), "."

    def _coordination(self) -> tuple[str, str, str]:
        word = self._pick((Pair("and", "und"), Pair("but", "aber")))
        self._use(f"coordination {word.english}")
        one, other = self.clause(time=0.2, place=False), self.clause(time=0.2, place=False)
        english = f"{one.english()}, {word.english} {other.english()}"
        comma = "," if word.english == "but" else ""
        return english, f"{one.german('main')}{comma} {word.german} {other.german('main')}", "."

    def _trying(self) -> tuple[str, str, str]:
        """Draw an infinitive with zu after a verb that requires one."""
        self._use("infinitive with zu")
        subject, verb = self.subject(), self._pick(lexicon.VERBS["trying"])
        main = Clause(subject, verb, self._tense(subject, verb, False, ("present", "past")))
        inner = self.clause(subject=main.subject, negation=0.0, time=0.4, frequency=0.0, tenses=("present",))
        english = f"{main.english()} {inner.english_infinitive()}"
        return english, f"{main.german('main')}, {inner.german_infinitive()}", "."

    def _purpose(self) -> tuple[str, str, str]:
        """Draw a direction and "to ...", in German "um ... zu"."""
        self._use("um zu")
        main = self.clause(kind="motion", negation=0.0, time=0.0, frequency=0.0, tenses=("past", "present"))
        inner = self.clause(
            subject=main.subject, kind=self._pick(("thing", "person", "giving")), negation=0.0, time=0.0, frequency=0.0,
            tenses=("present",), place=False,
        )  # fmt: skip
        english = f"{main.english()} {inner.english_infinitive()}"
        return english, f"{main.german('main')}, um {inner.german_infinitive()}", "."

    def _comparison(self) -> tuple[str, str, str]:
        """Draw a description of something or somebody, perhaps compared with another."""
        nouns, adjectives = self._pick(((lexicon.PEOPLE, lexicon.PERSONAL), (lexicon.THINGS, lexicon.MATERIAL)))
        one, other = self._random.sample(nouns, 2)
        adjective, plural, past = self._pick(adjectives), self._chance(0.25), self._chance(0.4)
        determiner = self._pick(("the", *POSSESSIVES))
        subject = noun_phrase(one, determiner, plural=plural)
        than = (
            noun_phrase(other, self._pick(("the", *POSSESSIVES)), plural=self._chance(0.25)) if adjective.more else None
        )
        self._use("comparison" if than else "predicate")
        being = Being(subject, adjective, past, NOTHING if than else self._pick(lexicon.DEGREES[1:]), than)
        if self._chance(0.3):
            return being.english(question=True), being.german("inverted"), "?"
        return being.english(), being.german("main"), "."

    def _it(self) -> tuple[str, str, str]:
        """Draw a pronoun with the gender of the thing in the preceding clause."""
        self._use("it within a sentence")
        noun = self._pick(lexicon.THINGS)
        main = self.clause(kind="thing", time=0.0, place=False, negation=0.1, frequency=0.0)
        adjective = self._pick((None, *lexicon.MATERIAL))
        determiner = "the" if main.negated else self._pick(("the", "a"))
        main = replace(main, object=noun_phrase(noun, determiner, adjective=adjective))
        word = self._pick((Pair("because", "weil"), Pair("although", "obwohl")))
        being = Being(
            pronoun("it", noun.gender), self._pick(lexicon.MATERIAL), self._chance(0.5), self._pick(lexicon.DEGREES)
        )
        english = f"{main.english()} {word.english} {being.english()}"
        return english, f"{main.german('main')}, {word.german} {being.german('final')}", "."

    def _there(self) -> tuple[str, str, str]:
        """Draw "there is", in German "es gibt" after the place."""
        self._use("there is")
        place = self._place()
        nouns, adjectives = self._pick(((lexicon.PEOPLE, lexicon.PERSONAL), (lexicon.THINGS, lexicon.MATERIAL)))
        plural = self._chance(0.6)
        what = noun_phrase(
            self._pick(nouns), "" if plural else "a", adjective=self._pick((None, *adjectives)), plural=plural,
            number=self._pick(lexicon.NUMBERS) if plural else None,
        )  # fmt: skip
        english = f"there {'are' if plural else 'is'} {what.object} {place.english}"
        return english, f"{place.german} gibt es {what.german['accusative']}", "."
