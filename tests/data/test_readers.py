from pathlib import Path

import pytest

from mtkit.data.readers import Lines, measure, measure_pair, read_pairs
from mtkit.data_settings import TextPair
from mtkit.errors import DataError
from tests.data.conftest import WritePair


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\n\na\n", ["", "", "a"]),
        ("\ufeffa\n\ufeffb\n".encode(), ["a", "\ufeffb"]),
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g\n".encode(), ["a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g"]),
        (b"a\rb\n", ["a\rb"]),
        (b"\x00\n", ["\x00"]),
        (b"\n", [""]),
    ],
)
def test_only_a_newline_ends_a_line(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert list(Lines(path)) == lines
    assert measure(path).lines == len(lines)


def test_lines_are_read_anew_by_each_loop(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\nb\n")
    lines = Lines(tmp_path / "text")
    assert list(lines) == list(lines) == ["a", "b"]


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("gut\nschön\n".encode("latin1"))
    with pytest.raises(DataError, match="latin, line 2: not UTF-8"):
        list(Lines(tmp_path / "latin"))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, what in (("none", "no file"), ("empty", "is empty"), (".", "is a folder")):
        with pytest.raises(DataError, match=what):
            measure(tmp_path / name)


def test_different_line_counts_are_refused_with_both(write_pair: WritePair) -> None:
    pair = write_pair("train", b"a\nb\nc", b"a\nb\n")
    with pytest.raises(DataError, match=r"train\.en has 3 lines and .*train\.de has 2"):
        measure_pair(pair)
    with pytest.raises(DataError):
        list(read_pairs(pair))


def test_pairs_come_in_order(write_pair: WritePair) -> None:
    pair: TextPair = write_pair("train", b"a\nb\n", b"x\ny")
    assert list(read_pairs(pair)) == [("a", "x"), ("b", "y")]


def test_the_fingerprint_is_of_the_content(write_pair: WritePair) -> None:
    one, other = measure_pair(write_pair("one", b"a\n", b"a\n"))
    assert one == other
    assert measure_pair(write_pair("two", b"b\n", b"a\n"))[0].sha256 != one.sha256
