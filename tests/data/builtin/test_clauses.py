import pytest

from mtkit.data.builtin.clauses import Being, Clause, sentence
from mtkit.data.builtin.lexicon import MATERIAL, PEOPLE, THINGS, VERBS, Pair, Verb
from mtkit.data.builtin.phrases import Phrase, name, noun_phrase, pronoun

LAMP = noun_phrase(next(noun for noun in THINGS if noun.english == "lamp"), "the")
NO_LAMP = noun_phrase(next(noun for noun in THINGS if noun.english == "lamp"), "no")
MAN = noun_phrase(PEOPLE[0], "the")
TODAY = Pair("today", "heute")


def verb(base: str) -> Verb:
    return next(each for kind in VERBS.values() for each in kind if each.base == base)


@pytest.mark.parametrize(
    ("clause", "english", "main", "final"),
    [
        (
            Clause(MAN, verb("pick"), "present", LAMP, time=TODAY),
            "the man picks up the lamp today",
            "der Mann holt heute die Lampe ab",
            "der Mann heute die Lampe abholt",
        ),
        (
            Clause(pronoun("you"), verb("pick"), "past", pronoun("it", "f"), time=TODAY),
            "you picked it up today",
            "du hast sie heute abgeholt",
            "du sie heute abgeholt hast",
        ),
        (
            Clause(name("Anna"), verb("arrive"), "past", time=TODAY),
            "Anna arrived today",
            "Anna ist heute angekommen",
            "Anna heute angekommen ist",
        ),
        (
            Clause(MAN, verb("buy"), "past", NO_LAMP, negated=True),
            "the man did not buy a lamp",
            "der Mann hat keine Lampe gekauft",
            "der Mann keine Lampe gekauft hat",
        ),
        (
            Clause(pronoun("they"), verb("help"), "can", MAN, negated=True),
            "they cannot help the man",
            "sie können dem Mann nicht helfen",
            "sie dem Mann nicht helfen können",
        ),
        (
            Clause(pronoun("I"), verb("give"), "want", LAMP, pronoun("she")),
            "I want to give her the lamp",
            "ich will ihr die Lampe geben",
            "ich ihr die Lampe geben will",
        ),
        (
            Clause(pronoun("he"), verb("dance"), "like", frequency=Pair("often", "oft")),
            "he often likes to dance",
            "er tanzt oft gern",
            "er oft gern tanzt",
        ),
    ],
)
def test_german_verbs_go_second_and_last(clause: Clause, english: str, main: str, final: str) -> None:
    assert clause.english() == english
    assert clause.german("main") == main
    assert clause.german("final") == final


def test_questions_and_fronted_times_turn_subject_and_verb() -> None:
    clause = Clause(MAN, verb("look"), "present", LAMP, time=TODAY)
    assert clause.english(question=True) == "does the man look for the lamp today"
    assert clause.german("inverted") == "sucht der Mann heute die Lampe"
    assert clause.german("inverted", time=False) == "sucht der Mann die Lampe"


def test_infinitives_take_zu_inside_a_separable_prefix() -> None:
    assert Clause(MAN, verb("throw"), "present", LAMP).german_infinitive() == "die Lampe wegzuwerfen"
    assert Clause(MAN, verb("see"), "present", LAMP).german_infinitive() == "die Lampe zu sehen"


@pytest.mark.parametrize(
    ("subject", "past", "english", "german"),
    [
        (pronoun("I"), False, "I am old", "ich bin alt"),
        (pronoun("you"), True, "you were old", "du warst alt"),
        (MAN, True, "the man was old", "der Mann war alt"),
        (pronoun("we"), False, "we are old", "wir sind alt"),
    ],
)
def test_being_agrees_with_its_subject(subject: Phrase, past: bool, english: str, german: str) -> None:
    being = Being(subject, MATERIAL[0], past)
    assert (being.english(), being.german("main")) == (english, german)


def test_sentences_close_relative_clauses_with_one_comma() -> None:
    assert sentence("der Mann, der lacht,, aber sie lacht, die, ") == "Der Mann, der lacht, aber sie lacht, die."
    assert sentence("wo ist er", "?") == "Wo ist er?"
