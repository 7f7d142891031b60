"""Where sentences end, in several languages."""

import re
import time
import unicodedata
from importlib import import_module

import pytest

from mtkit.text.sentences import ABBREVIATIONS, sentences

PARTED = [
    ("en", "A man sleeps.|A dog barks!|Who sees it?|Nobody…|The end."),
    ("en", "“Come in.”|She sat down.|(It was late.)|'Yes!' he said.|[So it was.]|Then they left."),
    ("en", "Dr. Smith lives at 3.14 Elm St. Louis.|He paid $5.20 to J. R. Miller, e.g. on Jan. 5.|He left."),
    ("en", "Was it No. 7?|No.|He left."),
    ("en", "The U.S. President met Mr. Brown vs. Mrs. Green in 1999.|Inc. and Ltd. are short."),
    ("en", "1. The first point.|2. The second one."),
    ("en", "Wait ... what? no.|He said etc. and left."),
    ("en", "all is lower case.|it has no capitals!|so be it."),
    ("en", "A man sleeps . . . and snores.|A dog too ."),
    ("en", "It is late .|We go ."),
    ("en", "See www.example.com now.|Version 2.9.1 is out.|Mail a.b@c.org today."),
    ("de", "Das ist z. B. Herr Dr. Müller, bzw. Frau Prof. Maier.|Er kam am 3. Oktober 1990.|Sie ging."),
    ("de", "Friedrich II. regierte.|Nr. 5 lebt.|»Ja.«|»Nein.«|„Gut.“|Ende"),
    ("fr", "M. Dupont est là.|« Oui. »|Elle part !|« Non ? »|C'est fini."),
    ("es", "¿Quién es?|¡Nadie!|El Sr. Pérez no vino."),
    ("ru", "Он пришёл.|Это ул. Ленина, т. е. центр.|А. С. Пушкин — поэт."),
    ("zh", "今天天气很好。|我们去公园吧！|你来吗？|他说：“好。”|她走了……然后回来了。|圆周率是3.14。"),
    ("ja", "今日は晴れ。|明日は雨。|「はい。」と言う。|本当！？|（そうだ。）|終わり。"),
    ("ja", "Yes!|本当?|すごい!"),
    ("zh-CN", "Anna Co., Ltd. 在东京买了咖啡。|他说，Mr. Smith来了。|她走了。"),
    ("Japanese", "図はFig. 3を参照。|「Ver. 2.0」です。|J. R. Millerは来た。"),
    ("ko", "좋아요.|그림Fig. 3을 보세요.|끝."),
    ("en", "See Ver. 2.0 here.|It ran."),
    ("ja", "やった‼|本当⁉|すごい⁇|終わり"),
    ("en", "A man sleeps‼|Who sees it⁉\ufe0f|It is 3⁈ he said.|The end."),
    ("bo", "ཁོང་ལྷ་སར་འགྲོ་གི་འདུག །|ང་ཚོ་སླེབས་སོང་།|བཀྲ་ཤིས་བདེ་ལེགས༎"),
    ("ja", "行った．|来た．|値は３．５である．"),
    ("ar", "هل جاء؟|نعم.|ذهب الولد!|انتهى"),
    ("hi", "राम घर गया।|क्या वह आया?|हाँ।|मूल्य 3.14 है।"),
    ("ur", "وہ گیا۔|کیا وہ آیا؟|ہاں۔"),
    ("hy", "Նա եկավ։|Նա գնաց։"),
    ("el", "Ποιος είναι;|Κανείς.|Τέλος"),
    ("my", "သူလာတယ်။|သူသွားတယ်။"),
    ("km", "គាត់មក។|គាត់ទៅ។"),
    ("th", "เขามา เขาไป"),
    ("en", "• Anna sleeps.|• The dog barks.|‣ It eats.|· It runs.|¶ It stops.|/ It waits.|& It leaves.|† It returns."),
    ("en", "Anna sleeps.|😆 The dog barks.|→ It runs.|❤️ _It_ stops.|<b>It</b> waits.|:-) It leaves."),
    ("en", "She paid approx. €5 to No. §7.|<i>He slept.</i>|<br/> “• So it was.”"),
    ("de", "Das gilt nicht.|§ 5 bleibt.|§5a auch.|Es kostet ca. §0 nichts."),
    ("zh", "他走了。。|（她来了。），然后走了。|→ 他说。"),
    ("ja", "「はい。」、と言う。|・次の項目。"),
    ("zh", "他走了。|甲. 一种方法。"),
    ("ja", "これはペンです。|２. あれは本です。"),
    ("ko", "플랜B.|그래서 갔다."),
    ("ko", "저자는J. Smith이다.|끝."),
    ("zh", "作者是J. Smith。|他说（J. Smith）。|王先生、J. Smith和她。"),
    ("en", "They are ﬁt.|We go home."),
    ("es", "Vamos a ver.|3 personas vinieron."),
    ("he", "הוא הלך.\u200f|היא באה.\u200e|סוף"),
    ("xx", "One of no known language.|Two!|(Three.)|Four"),
]


@pytest.mark.parametrize(("language", "text"), PARTED, ids=lambda value: value[:12])
def test_text_is_parted_at_the_ends_of_sentences(language: str, text: str) -> None:
    glue = "" if language in ("zh", "ja", "my", "km") else " "
    expected = text.split("|")
    assert [each.strip() for each in sentences(glue.join(expected), language)] == expected


@pytest.mark.parametrize("language", ["en-GB", "EN", "eng", "en_US"])
def test_languages_have_several_names(language: str) -> None:
    assert len(sentences("Mr. Brown sleeps. He snores.", language)) == 2


@pytest.mark.parametrize(
    "text", ["", " ", ".", "...", "?!", "。", " . ", "A", "a. b. c.", "\u2028.\u0085 A. \u3000。", "»«“”. X"]
)
def test_nothing_is_lost(text: str) -> None:
    for language in ("en", "ja", None):
        found = sentences(text, language)
        assert "".join(found) == text
        assert all(found)


def test_a_blank_text_is_one_sentence_at_most() -> None:
    assert sentences("", "en") == []
    assert len(sentences(" ... ", "en")) == 1


def test_long_runs_of_marks_take_no_time() -> None:
    """No square of their length: this would be hours."""
    for text in (
        "." * 200_000,
        ". " * 100_000,
        "a." * 100_000,
        "a. " * 100_000,
        ".\u201d " * 70_000 + "x",
        "\u201d" * 200_000,
        " " * 200_000,
        "1. " * 70_000,
        "१। • " * 40_000,
        "! <a" * 50_000,
        "• . &a" * 30_000,
    ):
        assert "".join(sentences(text, "fr")) == text


def test_long_runs_of_tags_and_entities_take_no_time() -> None:
    """Marks within them end no sentence; without this, each would read all that follow."""
    began = time.process_time()
    for text in ("&a; " * 20_000, "<b !>" * 40_000, ";) " * 20_000, ";( " * 20_000, "! <b !> &a; :) " * 10_000):
        for end in ("", "x"):
            assert "".join(sentences(text + end, "el")) == text + end
    assert time.process_time() - began < 5


def test_marks_within_tags_and_entities_end_no_sentence() -> None:
    assert sentences("Anna <b title='Oh! So. It'>sleeps</b>. He left.", "en") == [
        "Anna <b title='Oh! So. It'>sleeps</b>. ",
        "He left.",
    ]
    assert sentences("Η Anna &amp; Ο Γιώργος. Τέλος", "el") == ["Η Anna &amp; Ο Γιώργος. ", "Τέλος"]


def test_a_quotation_that_begins_belongs_to_what_follows() -> None:
    assert sentences("他走了。“你好。”“不好。”", "zh") == ["他走了。", "“你好。”", "“不好。”"]
    assert sentences("„Ja.“ Er ging.", "de") == ["„Ja.“ ", "Er ging."]


@pytest.mark.parametrize(
    "tail",
    [
        *"\u200b\ufeff\u00ad\u200e\u202c\u2069\x01♥😆©|~+1½①—",
        "❤️",
        "<3",
        "[1]",
        "(1)",
        "12!",
        "%.",
        "&nbsp;",
        "</p>",
        ":D",
    ],
)
@pytest.mark.parametrize(("language", "text"), [("en", "Anna sleeps. "), ("zh", "他走了。"), ("ja", "犬が寝る。 ")])
def test_what_has_no_letters_is_no_sentence(language: str, text: str, tail: str) -> None:
    assert sentences(text + tail, language) == [text + tail]
    assert sentences(f"{tail} {text}", language) == [f"{tail} {text}"]
    found = sentences(f"{text}{tail} {text}", language)
    assert len(found) == 2
    assert all(text.strip() in each for each in found)


def test_decomposed_text_has_the_same_sentences() -> None:
    texts = [("fr", "É. Zola dort. Il rêve."), ("sv", "Å. Larsson kom. Ön sov."), ("yo", "Ọ́. Ṣoyinka wá. Ó lọ.")]
    texts += [(code, f"Xaaa {name}. Yaaa gaaa.") for code, names in ABBREVIATIONS.items() for name in names]
    for language, text in texts:
        composed, decomposed = (
            [unicodedata.normalize("NFC", each) for each in sentences(unicodedata.normalize(form, text), language)]
            for form in ("NFC", "NFD")
        )
        assert composed == decomposed
    assert [each.strip() for each in sentences(unicodedata.normalize("NFD", texts[2][1]), "yo")][1:] == [
        unicodedata.normalize("NFD", "Ó lọ.")
    ]


@pytest.mark.parametrize("module", ["sentences", "words", "characters", "sampling"])
def test_no_pattern_repeats_a_group_possessively(module: str) -> None:
    """Python 3.11.2, the one of Debian 12, raises SystemError for such patterns or matches wrongly."""
    patterns = [
        value for value in vars(import_module(f"mtkit.text.{module}")).values() if isinstance(value, re.Pattern)
    ]
    assert not [pattern.pattern for pattern in patterns if re.search(r"\)[*+?]\+", pattern.pattern)]
