"""Cutting text that is too long."""

from collections.abc import Sequence

import pytest

from mtkit.decoding.lines.splitting import split_sentences, split_to_fit


def words(texts: Sequence[str]) -> list[int]:
    """A word is a piece for every four characters begun."""
    return [sum(-(-len(word) // 4) for word in text.split()) for text in texts]


def test_sentences_are_kept_together_as_long_as_they_fit() -> None:
    text = "One two. Six ten! Who is it? “So.” 3.5 is odd. end"
    assert split_to_fit(text, 6, words) == ["One two. Six ten!", "Who is it? “So.”", "3.5 is odd. end"]


def test_a_long_sentence_is_cut_at_clauses_then_spaces_then_anywhere() -> None:
    assert split_to_fit("a b c, d e f, g. h", 4, words) == ["a b c,", "d e f, g.", "h"]
    assert split_to_fit("a b c d e f g h i", 4, words) == ["a b c d", "e f g h", "i"]
    assert split_to_fit("abcdefghijklmnopqrstuvwxyz", 2, words) == ["abcdef", "ghijklm", "nopqrs", "tuvwxyz"]


def test_a_long_run_of_marks_is_cut_in_linear_time() -> None:
    for mark in (".", "…", ",", ";)", ".)"):
        text = f"a{mark * 50_000}b"
        assert "".join(split_to_fit(text, 10_000, lambda texts: list(map(len, texts)))) == text


def test_arabic_and_japanese_clauses_are_cut_at_their_commas() -> None:
    assert split_to_fit("a b، c d؛ e f", 3, words) == ["a b،", "c d؛", "e f"]
    assert split_to_fit("今日は､晴れ", 4, lambda texts: [len(each) for each in texts]) == ["今日は､", "晴れ"]


def test_thai_and_lao_are_cut_at_spaces_where_they_have_more_pieces_than_usual() -> None:
    text = "ใหญ่ที่นี่ หมาเห็นน้ำ ผู้หญิงชอบน้ำ เด็กชอบหมา"

    def characters(texts: Sequence[str]) -> list[int]:
        return [len(each.replace(" ", "")) for each in texts]

    for language in ("th", "lo"):
        assert split_sentences(text, language, characters, most=1, pieces=25) == [
            "ใหญ่ที่นี่ หมาเห็นน้ำ",
            "ผู้หญิงชอบน้ำ เด็กชอบหมา",
        ]
        assert split_sentences(text, language, characters, most=1, pieces=99) == [text]
    assert split_sentences(text, "xx", characters, most=1, pieces=25) == [text]


def test_text_without_spaces_is_cut_behind_its_full_stops() -> None:
    def characters(texts: Sequence[str]) -> list[int]:
        return [len(text) for text in texts]

    assert split_to_fit("今日は晴れ。明日は雨。「はい。」と言う、人", 12, characters) == [
        "今日は晴れ。明日は雨。",
        "「はい。」と言う、人",
    ]


@pytest.mark.parametrize("longest", [1, 2, 5, 40])
def test_nothing_is_lost_and_everything_fits(longest: int) -> None:
    text = ("Well, this is it -- or not? " * 7 + "x" * 50 + "\u2028 \u0085 ...  ; ") * 3
    parts = split_to_fit(text, longest, words)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert max(words(parts)) <= longest
    assert all(part == part.strip() and part for part in parts)


def test_pieces_that_differ_at_the_seams_still_fit() -> None:
    """Joined sentences may have more pieces than the sum of theirs."""

    def count(texts: Sequence[str]) -> list[int]:
        return [len(text) + 3 * text.count(". ") for text in texts]

    parts = split_to_fit("aa. bb. cc. dd. ee. ff.", 10, count)
    assert max(count(parts)) <= 10
    assert "".join(parts).replace(" ", "") == "aa.bb.cc.dd.ee.ff."


FIVE = "A man sleeps. A dog barks! Who sees it? Nobody. The end."


def test_a_line_of_more_sentences_than_usual_is_cut() -> None:
    assert split_sentences(FIVE, "en", words, most=1, pieces=99) == [
        "A man sleeps.",
        "A dog barks!",
        "Who sees it?",
        "Nobody.",
        "The end.",
    ]
    assert split_sentences(FIVE, "en", words, most=2, pieces=99) == [
        "A man sleeps. A dog barks!",
        "Who sees it? Nobody.",
        "The end.",
    ]
    assert split_sentences(FIVE, "en", words, most=5, pieces=99) == [FIVE]


def test_a_line_with_more_pieces_than_usual_is_cut_at_sentence_ends_alone() -> None:
    for most in (5, None):
        parts = split_sentences(FIVE, "en", words, most=most, pieces=6)
        assert parts == ["A man sleeps.", "A dog barks!", "Who sees it? Nobody.", "The end."]
    long = "A man, who sleeps; and a dog that barks " * 5
    assert split_sentences(long, "en", words, most=1, pieces=8) == [long]
    assert split_sentences(f"Yes. {long}", "en", words, most=2, pieces=8) == ["Yes.", long.strip()]


def test_what_is_no_end_of_a_sentence_cuts_no_line() -> None:
    text = "Das ist z. B. Herr Dr. Maier am 3. Oktober, um 3.14 Uhr."
    assert split_sentences(text, "de", words, most=1, pieces=3) == [text]
    assert split_to_fit(f"{text} Und er geht.", 16, words, "de") == [text, "Und er geht."]
    assert split_sentences("今日は晴れ。「はい。」と言う。", "ja", words, most=1, pieces=99) == [
        "今日は晴れ。",
        "「はい。」と言う。",
    ]
