import pytest

from mtkit.data.builtin.lexicon import CASES, MATERIAL, PEOPLE, THINGS, Pair
from mtkit.data.builtin.phrases import noun_phrase, owned, pronoun

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
