"""Noun phrases of the built-in corpus: determiner, adjective and noun agree in German case, gender and number."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtkit.data.builtin.lexicon import CASES, Adjective, Noun, Pair

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


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in both languages, with what verbs and word order need to know of it."""

    subject: str
    """English, as a subject; `object` likewise."""
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
        """With a relative clause behind it; German sets it between commas."""
        texts = {case: f"{text}, {german}," for case, text in self.german.items()}
        return replace(self, subject=f"{self.subject} {english}", object=f"{self.object} {english}", german=texts)

    def relative(self, case: str) -> str:
        """The German relative pronoun that refers to it."""
        if self.plural and case == "dative":
            return "denen"
        return _DEFINITE[case]["plural" if self.plural else self.gender]


def pronoun(word: str, gender: str = "m") -> Phrase:
    """The pronoun of an English subject form; "it" is German by the gender of the noun it stands for."""
    key = f"it-{gender}" if word == "it" else word
    object_form, person, plural, forms = _PRONOUNS[key]
    german = dict(zip(CASES, forms.split(), strict=False))
    return Phrase(word, object_form, german, person, plural, gender, pronoun=True)


def name(text: str) -> Phrase:
    """A person's name, the same in both languages and in every case."""
    return Phrase(text, text, dict.fromkeys(CASES, text))


def both(one: str, other: str) -> Phrase:
    """Two names joined, a plural."""
    english, german = f"{one} and {other}", f"{one} und {other}"
    return Phrase(english, english, dict.fromkeys(CASES, german), plural=True)


def noun_phrase(
    noun: Noun, determiner: str, *, adjective: Adjective | None = None, plural: bool = False, number: Pair | None = None
) -> Phrase:
    """A determiner ("the", "a", "no", a possessive, or "" for a bare or counted plural), an adjective and a noun.

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
    """ "The teacher's car": German sets the owner behind, in the genitive."""
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
    """The adjective's ending: strong without a determiner, weak after "der", mixed after "ein"."""
    if not determiner:
        return {"nominative": "e", "accusative": "e", "dative": "en", "genitive": "er"}[case]
    changes = case in {"dative", "genitive"} or slot == "plural" or (case == "accusative" and slot == "m")
    if changes:
        return "en"
    return "e" if determiner == "the" else {"m": "er", "f": "e", "n": "es"}[slot]


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
"""Object form, person, plural, and German in the first three cases."""
