import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.readers import Repairs, read_corpus
from mtkit.text.readers.tables import jsonl_rows, tsv_rows

Read = Callable[..., list[Any]]


@pytest.fixture
def tsv(tmp_path: Path) -> Read:
    """Writes a TSV file and reads columns of it."""

    def read(text: str, *columns: str, gaps: bool = False) -> list[Any]:
        (tmp_path / "a.tsv").write_bytes(text.encode())
        return list(tsv_rows(tmp_path / "a.tsv", columns, Repairs(), gaps=gaps))

    return read


@pytest.fixture
def jsonl(tmp_path: Path) -> Read:
    """Writes a JSONL file and reads columns of it."""

    def read(text: str, *columns: str, gaps: bool = False, repairs: Repairs | None = None) -> list[Any]:
        (tmp_path / "a.jsonl").write_bytes(text.encode())
        return list(jsonl_rows(tmp_path / "a.jsonl", columns, repairs or Repairs(), gaps=gaps))

    return read


def test_columns_by_name_have_a_header_and_by_number_none(tsv: Read) -> None:
    assert tsv("en\tid\tde\na\t1\tx\nb\t2\ty\n", "en", "de") == [(2, ["a", "x"]), (3, ["b", "y"])]
    assert tsv("a\t1\tx\nb\t2\ty\n", "1", "3") == [(1, ["a", "x"]), (2, ["b", "y"])]
    assert tsv("\ufeffen\tde\r\na\tx\r\n", "de", "en") == [(2, ["x", "a"])]


def test_a_recipe_gives_columns_by_number_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tx\n")
    corpus = Corpus.model_validate({"file": str(tmp_path / "a.tsv"), "source": 2, "target": 1})
    assert [pair[1:3] for pair in read_corpus(corpus)] == [("x", "a")]


def test_nothing_but_tabs_and_newlines_parts_fields(tsv: Read) -> None:
    text = '"a\tb"\n\'c\tit\'s "d\u2028e\x0b\x85\n\t\n \t a \n'
    assert [cells for _, cells in tsv(text, "1", "2")] == [
        ['"a', 'b"'],
        ["'c", "it's \"d\u2028e\x0b\x85"],
        ["", ""],
        [" ", " a "],
    ]


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("en\tde\na\tx\nb\n", ("en", "de"), "a.tsv, line 3: 1 fields where the first line has 2"),
        ("a\tx\nb\ty\tz\n", ("1", "2"), "a.tsv, line 2: 3 fields where the first line has 2"),
        ("a\tx\n\nb\ty\n", ("1", "2"), "a.tsv, line 2: 1 fields"),
        ("a\tx\n", ("1", "3"), "columns 1 to 2, so not all of 1, 3"),
        ("a\tx\n", ("0", "1"), "columns 1 to 2, so not all of 0, 1"),
        ("en\tde\n", ("en", "fr"), r"no column 'fr' in its first line \(en, de\)"),
        ("en\ten\n", ("en",), "several columns 'en'"),
        ("en\tde\n", ("en", "2"), "all by name or all by number"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tsv: Read, text: str, columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tsv(text, *columns)


def test_an_empty_line_is_a_row_where_it_ends_a_document(tsv: Read, jsonl: Read) -> None:
    for gap in ("", "  ", "\t"):  # blank is as good as empty, as in text files
        rows = [(2, ["a", "x"]), (3, ["", ""]), (4, ["b", "y"])]
        assert tsv(f"en\tde\na\tx\n{gap}\nb\ty\n", "en", "de", gaps=True) == rows
        assert jsonl(f'{{"a": "x"}}\n{gap}\n{{"a": "y"}}\n', "a", gaps=True) == [(1, ["x"]), (2, [""]), (3, ["y"])]


def test_keys_may_be_nested_or_have_a_dot(jsonl: Read, tmp_path: Path) -> None:
    rows = [{"pair": {"en": f"a{n}", "de": "ü\u2028"}, "a.b": "c", "doc": n} for n in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=bool(n)) + "\n" for n, row in enumerate(rows))
    expected = [(n + 1, [f"a{n}", "ü\u2028", "c", n]) for n in range(3)]
    columns = ("pair.en", "pair.de", "a.b", "doc")
    assert jsonl(text, *columns) == expected
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert list(jsonl_rows(tmp_path / "a.jsonl.gz", columns, Repairs(), gaps=False)) == expected


def test_newlines_inside_a_string_become_spaces_and_are_counted(jsonl: Read) -> None:
    repairs = Repairs()
    assert jsonl('{"a": "x\\ny\\r\\nz\\n"}\n{"a": "x\\r"}\r\n', "a", repairs=repairs) == [(1, ["x y z"]), (2, ["x"])]
    assert repairs == Repairs(carriage_returns=2, inner_newlines=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": "x"', "not JSON"),
        ("", "not JSON .the line is empty"),
        ('["a"]', "a list, not a JSON object"),
        ('"a"', "a string, not a JSON object"),
        ('{"b": "x", "c": 1}', "no key 'a'; there is b, c"),
        ("{}", "no key 'a'; there is none"),
        ('{"a": null}', "'a' holds null, not text"),
        ('{"a": ["x"]}', "'a' holds a list, not text"),
        ('{"a": {"en": "x"}}', "'a' holds an object, not text"),
        ('{"a": true}', "'a' holds true or false, not text"),
        ('{"a": 1.5}', "'a' holds a number, not text"),
        ('{"a": "x\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_holds_no_text_is_named(jsonl: Read, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {message}") as raised:
        jsonl(f'{{"a": "x"}}\n{line}\n{{"a": "y"}}\n', "a")
    assert "\n" not in str(raised.value)


def test_a_whole_surrogate_pair_is_one_character(jsonl: Read) -> None:
    assert jsonl('{"a": "\\ud83d\\ude00"}\n', "a") == [(1, ["😀"])]
