"""Where sentences end, in several languages."""

import pytest

from mtkit.data.lines.sentences import sentences

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
    ("ja", "行った．|来た．|値は３．５である．"),
    ("ar", "هل جاء؟|نعم.|ذهب الولد!|انتهى"),
    ("hi", "राम घर गया।|क्या वह आया?|हाँ।|मूल्य 3.14 है।"),
    ("ur", "وہ گیا۔|کیا وہ آیا؟|ہاں۔"),
    ("hy", "Նա եկավ։|Նա գնաց։"),
    ("el", "Ποιος είναι;|Κανείς.|Τέλος"),
    ("my", "သူလာတယ်။|သူသွားတယ်။"),
    ("km", "គាត់មក។|គាត់ទៅ។"),
    ("th", "เขามา เขาไป"),
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
    ):
        assert "".join(sentences(text, "fr")) == text


def test_a_quotation_that_begins_belongs_to_what_follows() -> None:
    assert sentences("他走了。“你好。”“不好。”", "zh") == ["他走了。", "“你好。”", "“不好。”"]
    assert sentences("„Ja.“ Er ging.", "de") == ["„Ja.“ ", "Er ging."]
