"""Folding of many texts: what is passed over because nothing in it can change does not change."""

import unicodedata

import numpy as np
import pytest

from mtkit.data.subword.folding import Folding

LETTERS = "aßéůЖяΩ„–’日本カﾞ\u3099\u0301\u0327\u0308ﬁ…½ſŉ ĳ"


@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc", "identity"])
def test_many_texts_are_folded_as_each_alone(rule: str) -> None:
    folding = Folding(rule)
    texts = ["two  dogs ", "Ｔｗｏ dogs", "", "tab\there", "\x7f\x01a", "ﬁne", "好！", "Größe", "„Ja“ – sagte er’s"]
    texts += [chr(each) for each in range(0x3100)]
    assert folding.lines(texts) == [folding(text) for text in texts]


@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc"])
def test_rules_join_no_two_characters_of_text_that_is_passed_over(rule: str) -> None:
    folding = Folding(rule)
    draw = np.random.default_rng(1)
    simple = [chr(each) for some in (range(0x500), range(0x2010, 0x2028)) for each in some]
    pairs = [one + other for one, other in draw.choice(simple, (200_000, 2))]
    ascii_pairs = [chr(one) + chr(other) for one in range(128) for other in range(128)]
    mixtures = ["".join(each) for each in draw.choice([*LETTERS], (20_000, 6))]
    for texts in (pairs, ascii_pairs, mixtures):
        assert folding.lines(texts) == [folding(text) for text in texts]


def test_combining_characters_are_joined_with_what_they_follow() -> None:
    folding = Folding("nfkc")
    decomposed = [unicodedata.normalize("NFD", text) for text in ("Größe", "café", "Ångström", "й", "ガ")]
    assert folding.lines(decomposed) == ["Größe", "café", "Ångström", "й", "ガ"]
