"""Tables, and whether somebody watches the terminal."""

import io
import sys
import unicodedata

import pytest

from mtkit.terminal import aligned, markdown, short, shortened, stderr_is_terminal, stdout_width, wrapped


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_watched_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stderr in (Terminal(), io.StringIO(), closed, object(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert stderr_is_terminal() is isinstance(stderr, Terminal)


ROWS = [("name", "pieces", "note"), ("full", "1,234", "plain"), ("  part", "5", "")]


def test_columns_stand_below_their_heads() -> None:
    assert aligned(ROWS, left=(0, 2)) == (
        "name    pieces  note\n"
        "full     1,234  plain\n"
        "  part       5"
    )  # fmt: skip


def test_wide_letters_take_two_places() -> None:
    lines = aligned([("word", "count"), ("日本語", "1"), ("a", "20"), ("e\u0301", "300")]).split("\n")
    places = [sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line) for line in lines]
    assert places == [13, 13, 13, 14]  # the combining mark has no place of its own


def test_numbers_stay_as_they_are_written() -> None:
    assert aligned([("a", "b"), ("1e5", "0012"), ("nan", "1.50")]).split("\n")[1:] == ["1e5  0012", "nan  1.50"]


WIDE = [("name", "pieces per word", "note"), ("full", "1 to 2", "some words of a note"), ("b", "3", "well-known")]


def test_a_table_wider_than_the_terminal_is_wrapped_between_words() -> None:
    assert aligned(WIDE, left=(0, 2), width=43) == aligned(WIDE, left=(0, 2))
    assert aligned(WIDE, left=(0, 2), width=24) == (
        "name  pieces  note\n"
        "         per\n"
        "        word\n"
        "full  1 to 2  some words\n"
        "              of a note\n"
        "b          3  well-known"
    )  # fmt: skip


def test_columns_that_do_not_fit_follow_below() -> None:
    assert aligned(WIDE, left=(0, 2), width=16) == (
        "name  pieces per\n"
        "            word\n"
        "full      1 to 2\n"
        "b              3\n"
        "\n"
        "name  note\n"
        "full  some words\n"
        "      of a note\n"
        "b     well-known"
    )  # fmt: skip


def test_lines_are_wrapped_one_by_one() -> None:
    text = "one two three four five\nsix"
    assert wrapped(text, None) == text
    assert wrapped(text, 22, indent="  ") == "one two three four\n  five\nsix"


def test_wrapping_counts_two_columns_for_a_wide_letter() -> None:
    assert (
        wrapped("日本語 機械翻訳 e\u0301e\u0301e\u0301 four", 22, indent="  ")
        == "日本語 機械翻訳 e\u0301e\u0301e\u0301\n  four"
    )
    assert aligned([("name", "日本 語"), ("翻訳", "1"), ("full", "23")], width=9) == (
        "name  日本\n"
        "        語\n"
        "翻訳     1\n"
        "full    23"
    )  # fmt: skip


def test_only_a_terminal_has_a_width() -> None:
    assert stdout_width() is None


def test_a_table_without_rows_is_its_head() -> None:
    assert aligned([("name", "score")]) == "name  score"


def test_markdown_escapes_what_divides_columns() -> None:
    head, rule, *rows = markdown([("name", "score"), ("a|b", "1.0")]).split("\n")
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["name", "score"]
    left, right = (cell.strip() for cell in rule.strip("|").split("|"))
    assert (left[0], right[-1], left[-1], right[0]) == (":", ":", "-", "-")
    assert "a\\|b" in rows[0]


def test_a_long_sample_is_cut() -> None:
    assert shortened("a" * 200) == "a" * 200
    assert shortened("a" * 201) == "a" * 199 + "\u2026"


def test_no_text_acts_on_the_terminal() -> None:
    assert shortened("a\x1b[2J\tb\rc\x9b\u2028\u202e") == r"a\x1b[2J\tb\rc\x9b\u2028\u202e"
    assert shortened("Maß, 他, \u0646\u200c\u0647, \U0001f469\u200d\U0001f680") == (
        "Maß, 他, \u0646\u200c\u0647, \U0001f469\u200d\U0001f680"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.25, "0.25"), (999, "999"), (999.7, "1k"), (1234, "1.23k"), (7.1e6, "7.1M"), (3e18, "3e+03P")],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text
    prefix = text[-1] if text[-1].isalpha() else ""
    assert short(number, gap=" ") == (f"{text[:-1]} {prefix}" if prefix else text)
