"""Lines that were damaged or processed before are told from those that were not."""

import pytest

from mtkit.text.characters import ODDITIES

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
