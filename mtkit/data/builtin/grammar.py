"""The grammar of the built-in corpus: noun phrases and clauses with one meaning in both languages.

In German noun phrases, determiner, adjective and noun agree in case, gender and number. German clauses put the finite
verb second in main clauses ("main"; "inverted" if something else than the subject comes first, and in questions) and
last in subordinate ones ("final"); the rest of the verb group is at the end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtkit.data.builtin.lexicon import AUXILIARIES, CASES, Adjective, Noun, Pair, Verb

_DEFINITE = {
    "nominative": {"m": "der", "f": "die", "n": "das", "plural": "die"},
    "accusative": {"m": "den", "f": "die", "n": "das", "plural": "die"},
    "dative": {"m": "dem", "f": "der", "n": "dem", "plural": "den"},
    "genitive": {"m": "des", "f": "der", "n": "des", "plural": "der"},
}
_INDEFINITE = {
    "nominative": {"m": "", "f": "e", "n": "", "plural": "e"},
    "accusative": {"m": "en", "f": "e", "n": "", "plural": "e"},
    "dative": {"m": "em", "f": "er", "n": "em", "plural": "en"},
    "genitive": {"m": "es", "f": "er", "n": "es", "plural": "er"},
}
"""Endings of ein, kein, mein and the like."""

_STEMS = {"a": "ein", "no": "kein", "my": "mein", "his": "sein", "her": "ihr", "our": "unser"}
POSSESSIVES = ("my", "his", "her", "our")

_PRONOUNS = {
    "I": ("me", 1, False, "ich mich mir"),
    "you": ("you", 2, False, "du dich dir"),
    "he": ("him", 3, False, "er ihn ihm"),
    "she": ("her", 3, False, "sie sie ihr"),
    "we": ("us", 1, True, "wir uns uns"),
    "they": ("them", 3, True, "sie sie ihnen"),
    "it-m": ("it", 3, False, "er ihn ihm"),
    "it-f": ("it", 3, False, "sie sie ihr"),
    "it-n": ("it", 3, False, "es es ihm"),
}
"""Object form, person, plural, and the German nominative, accusative and dative."""


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in both languages, with the features that verbs and word order depend on."""

    subject: str
    """English as a subject; `object` is English as an object."""
    object: str
    german: Mapping[str, str]
    """German forms by case."""
    person: int = 3
    plural: bool = False
    gender: str = "m"
    definite: bool = True
    pronoun: bool = False

    @property
    def third_singular(self) -> bool:
        """Whether an English verb in the present adds -s."""
        return self.person == 3 and not self.plural

    def who(self, english: str, german: str) -> "Phrase":
        """Return the phrase with a relative clause after it, in German between commas."""
        texts = {case: f"{text}, {german}," for case, text in self.german.items()}
        return replace(self, subject=f"{self.subject} {english}", object=f"{self.object} {english}", german=texts)

    def relative(self, case: str) -> str:
        """Return the German relative pronoun for the phrase."""
        if self.plural and case == "dative":
            return "denen"
        return _DEFINITE[case]["plural" if self.plural else self.gender]


def pronoun(word: str, gender: str = "m") -> Phrase:
    """Return the pronoun of an English subject form; "it" has the gender of its German noun."""
    object_form, person, plural, forms = _PRONOUNS[f"it-{gender}" if word == "it" else word]
    german = dict(zip(CASES, forms.split(), strict=False))
    return Phrase(word, object_form, german, person, plural, gender, pronoun=True)


def name(text: str) -> Phrase:
    """Return a person's name, the same in both languages and in every case."""
    return Phrase(text, text, dict.fromkeys(CASES, text))


def both(one: str, other: str) -> Phrase:
    """Return two names joined, a plural."""
    english, german = f"{one} and {other}", f"{one} und {other}"
    return Phrase(english, english, dict.fromkeys(CASES, german), plural=True)


def noun_phrase(
    noun: Noun, determiner: str, *, adjective: Adjective | None = None, plural: bool = False, number: Pair | None = None
) -> Phrase:
    """Return a determiner ("the", "a", "no", a possessive, or "" for a bare or counted plural), adjective and noun.

    "no" is the German negation of an indefinite object; in English the verb carries the "not", and "a" stays.
    """
    english = [number.english if number else "", adjective.english if adjective else ""]
    words = [word for word in (*english, noun.plural if plural else noun.english) if word]
    if determiner in {"a", "no"}:
        article = "" if plural else "an" if words[0][0] in "aeiou" else "a"
        words = [article, *words] if article else words
    elif determiner:
        words = [determiner, *words]
    text = " ".join(words)
    german = {case: _german(noun, determiner, adjective, plural, number, case) for case in CASES}
    definite = bool(determiner) and determiner not in {"a", "no"}
    return Phrase(text, text, german, plural=plural, gender=noun.gender, definite=definite)


def owned(owner: Noun, noun: Noun) -> Phrase:
    """Return a phrase like "the teacher's car", whose German owner follows in the genitive."""
    english = f"the {owner.english}'s {noun.english}"
    thing, person = noun_phrase(noun, "the"), noun_phrase(owner, "the")
    german = {case: f"{thing.german[case]} {person.german['genitive']}" for case in CASES}
    return Phrase(english, english, german, gender=noun.gender)


def _german(
    noun: Noun, determiner: str, adjective: Adjective | None, plural: bool, number: Pair | None, case: str
) -> str:
    slot = "plural" if plural else noun.gender
    words = [number.german] if number else []
    if determiner == "the":
        words.insert(0, _DEFINITE[case][slot])
    elif determiner:
        words.insert(0, _STEMS[determiner] + _INDEFINITE[case][slot])
    if adjective:
        words.append(adjective.stem + _ending(determiner, case, slot))
    return " ".join([*words, noun.form(case, plural)])


def _ending(determiner: str, case: str, slot: str) -> str:
    """Return the adjective's ending: strong without a determiner, weak after "der", mixed after "ein"."""
    if not determiner:
        return {"nominative": "e", "accusative": "e", "dative": "en", "genitive": "er"}[case]
    if case in {"dative", "genitive"} or slot == "plural" or (case == "accusative" and slot == "m"):
        return "en"
    return "e" if determiner == "the" else {"m": "er", "f": "e", "n": "es"}[slot]


NOTHING = Pair("", "")


@dataclass(frozen=True)
class Clause:
    """A verb with its subject and objects.

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
        """Return the words in English order, without the adverbial of time if `time` is False."""
        return _join(*self._english_verb(question), self._english_rest(), self.time.english if time else "")

    def english_predicate(self) -> str:
        """Return the clause without its subject, after the relative pronoun "who"."""
        return _join(self._english_verb(False)[2], self._english_rest())

    def english_infinitive(self) -> str:
        """Return the clause as "to ..."."""
        return _join("to", self.verb.base, self._english_rest())

    def german(self, order: str, time: bool = True) -> str:
        """Return the words in a German order; see the module for the orders."""
        finite, end = self._german_verb(order)
        middle = self._middle(self.time.german if time else "")
        subject = self.subject.german["nominative"]
        if order == "main":
            return _join(subject, finite, middle, end)
        if order == "inverted":
            return _join(finite, subject, middle, end)
        return _join(subject, middle, end, finite)

    def german_predicate(self) -> str:
        """Return the verb-final clause without its subject, after a relative pronoun."""
        finite, end = self._german_verb("final")
        return _join(self._middle(""), end, finite)

    def german_infinitive(self) -> str:
        """Return the clause with zu and the infinitive, which come last."""
        return _join(self._middle(""), self.verb.zu_infinitive)

    def _english_verb(self, question: bool) -> tuple[str, str, str]:
        """Return the verb before the subject, the subject, and the rest of the verb group."""
        subject, often, base = self.subject.subject, self.frequency.english, self.verb.base
        if self.tense in {"will", "can", "must", "should"}:
            if question:
                return self.tense, subject, _join("not" if self.negated else "", often, base)
            finite = self.tense + (("not" if self.tense == "can" else " not") if self.negated else "")
            return "", subject, _join(finite, often, base)
        past = "past" if self.tense == "past" else "present"
        to = self.tense in {"want", "like"}
        third = self.subject.third_singular
        do = "did" if past == "past" else "does" if third else "do"
        head = self.tense if to else base
        rest = f"to {base}" if to else ""
        if question:
            return do, subject, _join("not" if self.negated else "", often, head, rest)
        if self.negated:
            return "", subject, _join(do, "not", head, rest)
        inflected = head + ("s" if third else "") if to else self.verb.inflected(past, third)
        return "", subject, _join(often, inflected, rest)

    def _english_rest(self) -> str:
        verb, thing = self.verb, self.object.object if self.object else ""
        late = bool(self.object and self.object.pronoun)
        recipient = self.recipient.object if self.recipient else ""
        objects = _join(verb.preposition, recipient, thing)
        return _join(objects if late else "", verb.particle, "" if late else objects, self.place.english)

    def _german_verb(self, order: str) -> tuple[str, str]:
        """Return the finite verb, and the part of the verb group at the end of the clause."""
        verb = self.verb
        if self.tense in {"present", "like"}:
            finite = verb.present(self.subject.person, self.subject.plural)
            return (verb.prefix + finite, "") if order == "final" else (finite, verb.prefix)
        if self.tense == "past":
            return _finite(verb.auxiliary, self.subject), verb.participle
        return _finite(self.tense, self.subject), verb.infinitive

    def _middle(self, time: str) -> str:
        """Return pronouns, time, dative, known things, negation, place, new things."""
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
        # an indefinite object carries the negation, as "kein"
        negation = "nicht" if self.negated and not new else ""
        return _join(*pronouns, time, self.frequency.german, gladly, *nouns, negation, self.place.german, new)


@dataclass(frozen=True)
class Being:
    """A description of its subject: "the lamp is very old", "the lamp is older than the table"."""

    subject: Phrase
    adjective: Adjective
    past: bool
    degree: Pair = NOTHING
    than: Phrase | None = None

    def english(self, question: bool = False) -> str:
        """Return the words in English order."""
        singular = self.subject.third_singular or self.subject.subject == "I"
        present = "am" if self.subject.subject == "I" else "is" if singular else "are"
        verb = ("was" if singular else "were") if self.past else present
        what = (self.adjective.more, f"than {self.than.subject}") if self.than else (self.adjective.english,)
        order = (verb, self.subject.subject) if question else (self.subject.subject, verb)
        return _join(*order, self.degree.english, *what)

    def german(self, order: str) -> str:
        """Return the words in a German order; the object of a comparison follows the verb."""
        finite = _finite("war" if self.past else "sein", self.subject)
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
    """Return words as a sentence: a capital first, one comma where two meet, none before the closing mark."""
    text = re.sub(r"(?:\s*,)+", ",", text).strip(" ,")
    text = re.sub(r",(?=\w)", ", ", text)
    return text[0].upper() + text[1:] + mark


def _finite(auxiliary: str, subject: Phrase) -> str:
    return AUXILIARIES[auxiliary][3 if subject.plural else subject.person - 1]


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)
