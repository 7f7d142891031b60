"""Lines that were damaged or processed before are told from those that were not."""

import unicodedata

import numpy as np
import pytest

from mtkit.text.characters import ODDITIES, Folding, has_invisible, visible

ODD = {
    "entities": ["Tom &amp; Anna", "&#39;Yes&#39;", "&nbsp;", "a &lt;b&gt;", "&#x27;"],
    "wrongly_decoded": [
        "FuÃŸ",
        "hÃ¤lt",
        "donâ€™t",
        "cafÃ©",
        "Â£5",
        "ÐŸÑ€Ð¸Ð²ÐµÑ‚",
        "ä½\u00a0å¥½",
        "à¸ªà¸§",
        "\ufffd",
        "ï»¿",
    ],
    "invisible": ["a\tb", "a\u00adb", "\u200b", "a\x00", "\x93Yes\x94", "נ\u200f."],
    "subword_marks": ["ho@@ use", "a ho@@", "don'@@ t"],
}
PLAIN = ["Tom & Anna, R&D; AT&T;", "x < y && y > z", "Fuß, hält, café", "Spaß“, sagte er", "IRMÃ” disse", "NÃO É, MÃE…"]
PLAIN += [
    "déjà\u00a0»",
    "Привет, мир",
    "你好。",
    "สวัสดี",
    "Ääh… ja",
    "5 £, 20 °C ½",
    "Ð is Icelandic",
    "a@b.c @@user @@",
]
PLAIN += ["می\u200cروم", "👨\u200d👩"]


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in ODD.items() for line in lines])
def test_odd_lines_are_found(kind: str, line: str) -> None:
    assert ODDITIES[kind](line)
    several = f"plain {line} plain" if kind == "invisible" else f"plain\n{line}\nplain"
    assert ODDITIES[kind](several)


@pytest.mark.parametrize("line", PLAIN)
def test_other_lines_are_not(line: str) -> None:
    assert not any(has(line) for has in ODDITIES.values())


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


INVISIBLE = "\x00\x01\x7f\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff"


@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc"])
def test_control_and_invisible_characters_are_dropped_or_become_spaces(rule: str) -> None:
    folding = Folding(rule)
    for text, plain in [(f"An{each}na", {"Anna", "An na"}) for each in INVISIBLE] + [
        (f"An{each}na", {"An na"}) for each in "\t\x0b\x0c\r\x1c\x85\u2028\u2029"
    ]:
        assert folding(text) in plain, ascii(text)
        assert folding.lines([text]) == [folding(text)]
    assert folding("走\u200b了。\ufeff") in ("走了。", "走 了。 ")


def test_joiners_stay_in_scripts_that_are_spelt_with_them_and_in_emoji() -> None:
    folding = Folding("nfkc")
    for text in ("می\u200cروم", "ක්\u200dෂ", "क्\u200dष", "👨\u200d👩\u200d👧", "❤\ufe0f\u200d🔥"):
        assert folding(text) == text
    assert folding("می\u200c روم\u200d") == "می روم"
    assert folding("Auf\u200clage") == "Auflage"


def test_invisible_characters_are_found() -> None:
    assert visible("a\tb\u200b") == "a b"
    assert not has_invisible("a  b, é 走了。")
    assert all(map(has_invisible, ["a\tb", "é\u200b", "\x00"]))
