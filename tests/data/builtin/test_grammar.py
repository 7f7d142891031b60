import pytest

from mtkit.data.builtin.grammar import Being, Clause, Phrase, name, noun_phrase, owned, pronoun, sentence
from mtkit.data.builtin.lexicon import CASES, MATERIAL, PEOPLE, THINGS, VERBS, Pair, Verb

NOUNS = {noun.english: noun for noun in (*PEOPLE, *THINGS)}
OLD = MATERIAL[0]


@pytest.mark.parametrize(
    ("noun", "determiner", "plural", "english", "german"),
    [
        ("man", "the", False, "the old man", "der alte Mann, den alten Mann, dem alten Mann"),
        ("woman", "the", False, "the old woman", "die alte Frau, die alte Frau, der alten Frau"),
        ("child", "the", False, "the old child", "das alte Kind, das alte Kind, dem alten Kind"),
        ("man", "a", False, "an old man", "ein alter Mann, einen alten Mann, einem alten Mann"),
        ("woman", "my", False, "my old woman", "meine alte Frau, meine alte Frau, meiner alten Frau"),
        ("child", "her", False, "her old child", "ihr altes Kind, ihr altes Kind, ihrem alten Kind"),
        ("boy", "the", False, "the old boy", "der alte Junge, den alten Jungen, dem alten Jungen"),
        ("boy", "our", False, "our old boy", "unser alter Junge, unseren alten Jungen, unserem alten Jungen"),
        ("car", "no", True, "old cars", "keine alten Autos, keine alten Autos, keinen alten Autos"),
        ("child", "the", True, "the old children", "die alten Kinder, die alten Kinder, den alten Kindern"),
        ("child", "", True, "old children", "alte Kinder, alte Kinder, alten Kindern"),
    ],
)
def test_determiner_adjective_and_noun_agree(
    noun: str, determiner: str, plural: bool, english: str, german: str
) -> None:
    phrase = noun_phrase(NOUNS[noun], determiner, adjective=OLD, plural=plural)
    assert phrase.object == english
    assert [phrase.german[case] for case in CASES[:3]] == german.split(", ")


def test_numbers_stand_before_the_adjective() -> None:
    phrase = noun_phrase(NOUNS["man"], "the", adjective=OLD, plural=True, number=Pair("two", "zwei"))
    assert (phrase.subject, phrase.german["dative"]) == ("the two old men", "den zwei alten Männern")


@pytest.mark.parametrize(
    ("noun", "article"), [("apple", "an apple"), ("letter", "a letter")]
)  # the article is that of the next word
def test_english_articles_fit_the_sound(noun: str, article: str) -> None:
    assert noun_phrase(NOUNS[noun], "a").subject == article


def test_owners_stand_behind_in_the_genitive() -> None:
    assert owned(NOUNS["teacher"], NOUNS["car"]).german["accusative"] == "das Auto des Lehrers"
    assert owned(NOUNS["boy"], NOUNS["lamp"]).german["nominative"] == "die Lampe des Jungen"


def test_it_is_german_by_gender() -> None:
    assert [pronoun("it", gender).german["accusative"] for gender in "mfn"] == ["ihn", "sie", "es"]


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
