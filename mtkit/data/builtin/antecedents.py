"""Pairs of sentences in which the German of the second depends on the first, and on nothing else.

| kind | antecedent | later sentence | the German depends on |
| :-- | :-- | :-- | :-- |
| pronoun | Anna bought a lamp. | It is new. (er, sie or es) | the gender of the noun: die Lampe |
| name | Sasha comes from Moscow. | Sasha slept. (Sascha or Sasha) | the origin: German transcribes Russian names |
| term | There is a crane in the zoo. | Paul saw the crane. (Kranich or Kran) | the meaning, by the place |

Every form is equally likely for a given later sentence. The two meanings of a term have one gender, so that all forms
of the later sentence differ in one word.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtkit.data.builtin import lexicon
from mtkit.data.builtin.grammar import Being, Clause, Phrase, name, noun_phrase, pronoun, sentence
from mtkit.data.builtin.lexicon import CASES, Adjective, Noun, Pair, Verb

Kind = Literal["pronoun", "name", "term"]


@dataclass(frozen=True)
class Dependency:
    """An antecedent with its translation, and a later sentence whose translation depends on it."""

    kind: Kind
    antecedent: Pair
    later: Pair
    """The later sentence with its only correct translation."""
    wrong: tuple[str, ...]
    """The later sentence's translation with each other form of the word that depends on the antecedent."""


def draw_dependency(kind: Kind, random_: random.Random) -> Dependency:
    """Draw the sentences of a kind."""
    return _KINDS[kind](random_)


# pronouns

_PAIRS = (
    Noun("pyjamas", "pyjamas", "Schlafanzug", "m", ""),
    Noun("headphones", "headphones", "Kopfhörer", "m", ""),
    Noun("scissors", "scissors", "Schere", "f", ""),
    Noun("trousers", "trousers", "Hose", "f", ""),
    Noun("binoculars", "binoculars", "Fernglas", "n", ""),
    Noun("fireworks", "fireworks", "Feuerwerk", "n", ""),
)
"""Things that are plural in English and singular in German: they are "they" in English, and er, sie or es in German."""

_OF_THINGS = tuple(word for word in lexicon.MATERIAL if word.english in {"new", "heavy", "cheap", "red", "green"})
"""Adjectives that do not apply to the people of a document, to whom "they" could refer."""

_WITH_THINGS = tuple(verb for verb in lexicon.VERBS["thing"] if verb.base in {"buy", "sell", "throw"})
"""Verbs whose object is not a person."""

_GENDERS = ("m", "f", "n")


def _pronoun(random_: random.Random) -> Dependency:
    word, gender = random_.choice(("it", "they")), random_.choice(_GENDERS)
    nouns = lexicon.THINGS if word == "it" else _PAIRS
    noun = random_.choice([noun for noun in nouns if noun.gender == gender])
    adjective = random_.choice((None, *lexicon.MATERIAL))
    thing = noun_phrase(noun, "a", adjective=adjective)
    if word == "they":
        bare = noun_phrase(noun, "", adjective=adjective, plural=True)
        thing = replace(thing, object=bare.object)
    antecedent = Clause(draw_name(random_), random_.choice(lexicon.VERBS["thing"]), "past", thing)
    forms = {form: pronoun("it", form) for form in _GENDERS}
    later = _statement(random_, _OF_THINGS, _WITH_THINGS)
    return _dependency("pronoun", _pair(antecedent), later, pronoun(word), forms, gender)


# names

NAMES = (
    Pair("Sasha", "Sascha"),
    Pair("Natasha", "Natascha"),
    Pair("Misha", "Mischa"),
    Pair("Masha", "Mascha"),
    Pair("Tanya", "Tanja"),
    Pair("Sonya", "Sonja"),
    Pair("Katya", "Katja"),
    Pair("Yuri", "Juri"),
    Pair("Ivan", "Iwan"),
    Pair("Vladimir", "Wladimir"),
    Pair("Pavel", "Pawel"),
    Pair("Vera", "Wera"),
)
"""English names with the German transcription from Russian. Other people of these names keep the English spelling."""

_ORIGINS = {
    "Russian": (Pair("Russia", "Russland"), Pair("Moscow", "Moskau"), Pair("Siberia", "Sibirien")),
    "other": (Pair("America", "Amerika"), Pair("Canada", "Kanada"), Pair("Australia", "Australien")),
}
"""Places of people whose names German transcribes, and of people whose names it keeps."""

_COME = Verb("come comes came", "komme kommst kommt kommen gekommen", auxiliary="sein")


def _name(random_: random.Random) -> Dependency:
    spelling, origin = random_.choice(NAMES), random_.choice(("Russian", "other"))
    english_name = name(spelling.english)
    forms = {"Russian": replace(english_name, german=dict.fromkeys(CASES, spelling.german)), "other": english_name}
    place = random_.choice(_ORIGINS[origin])
    antecedent = Clause(forms[origin], _COME, "present", place=Pair(f"from {place.english}", f"aus {place.german}"))
    return _dependency("name", _pair(antecedent), draw_action(random_), english_name, forms, origin)


# terms


Meaning = tuple[Noun, Sequence[Pair]]
"""A German noun, and the places that decide for it."""


def _meanings(english: str, gender: str, *meanings: str) -> tuple[Meaning, ...]:
    """Return the meanings of a term from lines like "Kranich: in the zoo = im Zoo, in the swamp = im Sumpf"."""
    nouns = []
    for meaning in meanings:
        german, places = meaning.split(": ")
        noun = Noun(english, "", german, gender, "", weak="n" if german == "Buchstabe" else "")
        nouns.append((noun, tuple(Pair(*place.split(" = ")) for place in places.split(", "))))
    return tuple(nouns)


TERMS = (
    _meanings(
        "spring", "f",
        "Feder: in the mattress = in der Matratze, in the lock = im Schloss",
        "Quelle: in the forest = im Wald, in the valley = im Tal",
    ),
    _meanings(
        "nut", "f",
        "Nuss: in the cake = im Kuchen, in the bowl = in der Schale",
        "Mutter: in the toolbox = im Werkzeugkasten, in the engine = im Motor",
    ),
    _meanings(
        "crane", "m",
        "Kranich: in the zoo = im Zoo, in the swamp = im Sumpf",
        "Kran: in the harbour = im Hafen, in the shipyard = in der Werft",
    ),
    _meanings(
        "match", "n",
        "Streichholz: in the box = in der Schachtel, in the drawer = in der Schublade",
        "Spiel: in the stadium = im Stadion, on television = im Fernsehen",
    ),
    _meanings(
        "file", "f",
        "Feile: in the toolbox = im Werkzeugkasten, in the workshop = in der Werkstatt",
        "Datei: on the computer = auf dem Computer, on the server = auf dem Server",
    ),
    _meanings(
        "letter", "m",
        "Brief: in the envelope = im Umschlag, in the mailbox = im Briefkasten",
        "Buchstabe: in the word = im Wort, in the alphabet = im Alphabet",
    ),
    _meanings(
        "plant", "f",
        "Pflanze: in the garden = im Garten, in the pot = im Topf",
        "Fabrik: in the suburb = im Vorort, on the motorway = an der Autobahn",
    ),
    _meanings(
        "seal", "f",
        "Robbe: in the sea = im Meer, on the beach = am Strand",
        "Dichtung: in the engine = im Motor, in the pump = in der Pumpe",
    ),
    _meanings(
        "note", "f",
        "Notiz: on the desk = auf dem Schreibtisch, in the diary = im Tagebuch",
        "Note: in the song = im Lied, in the melody = in der Melodie",
    ),
    _meanings(
        "mole", "m",
        "Maulwurf: in the garden = im Garten, in the field = auf dem Feld",
        "Leberfleck: on the arm = auf dem Arm, on the nose = auf der Nase",
    ),
)  # fmt: skip
"""Ambiguous English nouns, with German translations of one gender."""

_OF_TERMS = tuple(word for word in lexicon.MATERIAL if word.english in {"old", "new", "small", "beautiful"})
_WITH_TERMS = tuple(verb for verb in lexicon.VERBS["thing"] if verb.base in {"see", "find", "look", "paint"})


def _term(random_: random.Random) -> Dependency:
    meanings = random_.choice(TERMS)
    noun, places = random_.choice(meanings)
    place = random_.choice(places)
    thing = noun_phrase(noun, "a")
    antecedent = Pair(
        sentence(f"there is {thing.object} {place.english}"),
        sentence(f"{place.german} gibt es {thing.german['accusative']}"),
    )
    forms = {meaning.german: noun_phrase(meaning, "the") for meaning, _ in meanings}
    later = _statement(random_, _OF_TERMS, _WITH_TERMS)
    return _dependency("term", antecedent, later, forms[noun.german], forms, noun.german)


# sentences

_TENSES = ("past", "present", "will", "can")
_PEOPLE = tuple(noun for noun in lexicon.PEOPLE if noun.gender != "n")
"""People to whom "it" cannot refer."""


def draw_name(random_: random.Random) -> Phrase:
    """Draw a name that both languages spell alike."""
    return name(random_.choice((*lexicon.WOMEN, *lexicon.MEN)))


def draw_action(random_: random.Random) -> Callable[[Phrase], Pair]:
    """Draw a sentence about a person, as a function of the person, without any thing, place or pronoun."""
    tense, subject = random_.choice(_TENSES), random_.random() < 0.5
    if subject and random_.random() < 0.5:
        alone = random_.choice(lexicon.VERBS["alone"])
        return lambda person: _pair(Clause(person, alone, tense))
    other = noun_phrase(random_.choice(_PEOPLE), "the")
    verb = random_.choice(lexicon.VERBS["person"])
    return lambda person: _pair(Clause(*((person, verb, tense, other) if subject else (other, verb, tense, person))))


def _statement(
    random_: random.Random, adjectives: Sequence[Adjective], verbs: Sequence[Verb]
) -> Callable[[Phrase], Pair]:
    """Draw a description of a thing, or an action with it, as a function of the thing."""
    if random_.random() < 0.5:
        adjective, past, degree = random_.choice(adjectives), random_.random() < 0.5, random_.choice(lexicon.DEGREES)
        return lambda thing: _pair(Being(thing, adjective, past, degree))
    subject, verb, tense = draw_name(random_), random_.choice(verbs), random_.choice(_TENSES)
    return lambda thing: _pair(Clause(subject, verb, tense, thing))


def _pair(clause: Clause | Being) -> Pair:
    return Pair(sentence(clause.english()), sentence(clause.german("main")))


def _dependency(
    kind: Kind,
    antecedent: Pair,
    later: Callable[[Phrase], Pair],
    english: Phrase,
    forms: Mapping[str, Phrase],
    right: str,
) -> Dependency:
    """Return the sentences; `forms` are the phrases whose German the later sentence may have, one of them `right`."""
    german = {form: later(phrase).german for form, phrase in forms.items()}
    return Dependency(kind, antecedent, Pair(later(english).english, german.pop(right)), tuple(german.values()))


_KINDS: dict[Kind, Callable[[random.Random], Dependency]] = {"pronoun": _pronoun, "name": _name, "term": _term}
