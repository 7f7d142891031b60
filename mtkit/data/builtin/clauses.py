"""Clauses of the built-in corpus: one meaning, two word orders.

German puts the finite verb second in main clauses ("main"; "inverted" when something else than the subject comes
first, and in questions) and last in subordinate ones ("final"); the rest of the verb group goes to the end.
"""

import re
from dataclasses import dataclass

from mtkit.data.builtin.lexicon import AUXILIARIES, Adjective, Pair, Verb
from mtkit.data.builtin.phrases import Phrase

NOTHING = Pair("", "")


@dataclass(frozen=True)
class Clause:
    """Who does what to whom: a verb with its subject and objects.

    `tense` is present, past, like ("likes to sing", German "singt gern") or a modal: will, can, must, should, want.
    """

    subject: Phrase
    verb: Verb
    tense: str
    object: Phrase | None = None
    recipient: Phrase | None = None
    negated: bool = False
    frequency: Pair = NOTHING
    time: Pair = NOTHING
    place: Pair = NOTHING

    def english(self, question: bool = False, time: bool = True) -> str:
        """The words in English order; `time` False leaves the adverbial of time to the caller, who sets it first."""
        return _join(*self._english_verb(question), self._english_rest(), self.time.english if time else "")

    def english_predicate(self) -> str:
        """The clause without its subject, for "who ...": the subject is a relative pronoun."""
        return _join(self._english_verb(False)[2], self._english_rest())

    def english_infinitive(self) -> str:
        """The clause as "to ..."."""
        return _join("to", self.verb.base, self._english_rest())

    def german(self, order: str, time: bool = True) -> str:
        """The words in German order; see the module for the orders."""
        finite, end = self._german_verb(order)
        middle = self._middle(self.time.german if time else "")
        subject = self.subject.german["nominative"]
        if order == "main":
            return _join(subject, finite, middle, end)
        if order == "inverted":
            return _join(finite, subject, middle, end)
        return _join(subject, middle, end, finite)

    def german_predicate(self) -> str:
        """The verb-final clause without its subject, behind a relative pronoun."""
        finite, end = self._german_verb("final")
        return _join(self._middle(""), end, finite)

    def german_infinitive(self) -> str:
        """The clause with zu and the infinitive, which come last."""
        return _join(self._middle(""), self.verb.zu_infinitive)

    def _english_verb(self, question: bool) -> tuple[str, str, str]:
        """What stands before the subject, then the subject, then the verb group."""
        subject, often, base = self.subject.subject, self.frequency.english, self.verb.base
        if self.tense in {"will", "can", "must", "should"}:
            if question:
                return self.tense, subject, _join("not" if self.negated else "", often, base)
            finite = self.tense + (("not" if self.tense == "can" else " not") if self.negated else "")
            return "", subject, _join(finite, often, base)
        past = "past" if self.tense == "past" else "present"
        to = self.tense in {"want", "like"}
        do = "did" if past == "past" else "does" if self.subject.third_singular else "do"
        head = self.tense if to else base
        rest = f"to {base}" if to else ""
        if question:
            return do, subject, _join("not" if self.negated else "", often, head, rest)
        if self.negated:
            return "", subject, _join(do, "not", head, rest)
        third = self.subject.third_singular
        inflected = head + ("s" if third else "") if to else self.verb.inflected(past, third)
        return "", subject, _join(often, inflected, rest)

    def _english_rest(self) -> str:
        verb, thing = self.verb, self.object.object if self.object else ""
        late = bool(self.object and self.object.pronoun)
        recipient = self.recipient.object if self.recipient else ""
        objects = _join(verb.preposition, recipient, thing)
        return _join(objects if late else "", verb.particle, "" if late else objects, self.place.english)

    def _german_verb(self, order: str) -> tuple[str, str]:
        """The finite verb, and what of the verb group goes to the end of the clause."""
        verb, form = self.verb, self._form
        if self.tense in {"present", "like"}:
            finite = verb.present(self.subject.person, self.subject.plural)
            return (verb.prefix + finite, "") if order == "final" else (finite, verb.prefix)
        if self.tense == "past":
            return form(verb.auxiliary), verb.participle
        return form(self.tense), verb.infinitive

    def _form(self, auxiliary: str) -> str:
        return AUXILIARIES[auxiliary][3 if self.subject.plural else self.subject.person - 1]

    def _middle(self, time: str) -> str:
        """Pronouns, time, dative, known things, negation, place, new things."""
        recipient = self.recipient.german["dative"] if self.recipient else ""
        thing = self.object.german[self.verb.case] if self.object else ""
        pronouns, nouns, new = [], [], ""
        if self.object and self.object.pronoun:
            pronouns.append(thing)
        elif self.object and self.object.definite:
            nouns.append(thing)
        else:
            new = thing
        if self.recipient:
            (pronouns if self.recipient.pronoun else nouns).insert(0, recipient)
        gladly = "gern" if self.tense == "like" else ""
        # an indefinite object carries the negation itself, as "kein"
        negation = "nicht" if self.negated and not new else ""
        return _join(*pronouns, time, self.frequency.german, gladly, *nouns, negation, self.place.german, new)


@dataclass(frozen=True)
class Being:
    """What something is like: "the lamp is very old", "the lamp is older than the table"."""

    subject: Phrase
    adjective: Adjective
    past: bool
    degree: Pair = NOTHING
    than: Phrase | None = None

    def english(self, question: bool = False) -> str:
        """The words in English order."""
        singular = self.subject.third_singular or self.subject.subject == "I"
        present = "am" if self.subject.subject == "I" else "is" if singular else "are"
        verb = ("was" if singular else "were") if self.past else present
        what = (self.adjective.more, f"than {self.than.subject}") if self.than else (self.adjective.english,)
        order = (verb, self.subject.subject) if question else (self.subject.subject, verb)
        return _join(*order, self.degree.english, *what)

    def german(self, order: str) -> str:
        """The words in German order; what something is compared with stays behind the verb."""
        forms = AUXILIARIES["war" if self.past else "sein"]
        finite = forms[3 if self.subject.plural else self.subject.person - 1]
        subject, than = self.subject.german["nominative"], ""
        if self.than:
            than = f"als {self.than.german['nominative']}"
        what = _join(self.degree.german, self.adjective.german_more if self.than else self.adjective.german)
        if order == "main":
            return _join(subject, finite, what, than)
        if order == "inverted":
            return _join(finite, subject, what, than)
        return _join(subject, what, finite, than)


def sentence(text: str, mark: str = ".") -> str:
    """Words as a sentence: a capital first, one comma where two meet, none before the closing mark."""
    text = re.sub(r"(?:\s*,)+", ",", text).strip(" ,")
    text = re.sub(r",(?=\w)", ", ", text)
    return text[0].upper() + text[1:] + mark


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)
