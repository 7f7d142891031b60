import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.errors import DataError
from mtkit.text import word_vectors
from mtkit.text.word_vectors import WordVectors

GLOVE = "the 0.1 -0.2 3e-1\ncat 1 2 3\n"


def read(path: Path, width: int = 3, content: str | bytes | None = None) -> dict[str, list[float]]:
    """The vectors of a file by word, after `content` is written to it."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    file = WordVectors(path, width)
    return {entry.word: file.parse(entry).tolist() for entry in file}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GLOVE, ["the", "cat"]),
        ("2 3\n" + GLOVE, ["the", "cat"]),
        ("2 3\nthe 0.1 -0.2 3e-1 \ncat 1 2 3 \n", ["the", "cat"]),  # word2vec ends lines with a space
        (GLOVE.replace("\n", "\r\n"), ["the", "cat"]),
        (GLOVE.removesuffix("\n"), ["the", "cat"]),
        ("\ufeff" + GLOVE, ["the", "cat"]),
        ("\ufeff2 3\n" + GLOVE, ["the", "cat"]),
        (GLOVE + "\n\n", ["the", "cat"]),
        (GLOVE.replace(" ", "\t"), ["the", "cat"]),
        (GLOVE.replace(" ", "  "), ["the", "cat"]),
        ("the 1 2 3\nat name@domain.com 1 2 3\n. . . 1 2 3\n", ["the", "at name@domain.com", ". . ."]),
        ("2016 1 2 3\n0.5 1 2 3\n", ["2016", "0.5"]),
        # spaces for Python's str.split, not for the formats
        ("\x85 1 2 3\n\xa0 1 2 3\na\u2028b 1 2 3\n10\u202f000 1 2 3\n", ["\x85", "\xa0", "a\u2028b", "10\u202f000"]),
        ("北京 1 2 3\n今日は 1 2 3\nnaïve 1 2 3\n", ["北京", "今日は", "naïve"]),
    ],
)
def test_the_formats_of_word2vec_glove_and_fasttext_are_read(tmp_path: Path, content: str, words: list[str]) -> None:
    vectors = read(tmp_path / "v.vec", content=content)
    assert list(vectors) == words
    if words == ["the", "cat"]:
        assert np.allclose(list(vectors.values()), [[0.1, -0.2, 0.3], [1, 2, 3]])
    (tmp_path / "v.txt.gz").write_bytes(gzip.compress(content.encode()))
    assert read(tmp_path / "v.txt.gz") == vectors


def test_words_are_the_same_wherever_blocks_of_the_file_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v.vec"
    lines = [f"word{number} {number} 1 2" for number in range(50)]
    expected = read(path, content="\n".join(["50 3", *lines]) + "\n")
    assert len(expected) == 50
    for size in (1, 7, 64):
        monkeypatch.setattr(word_vectors, "_BLOCK", size)
        assert read(path) == expected


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("the 1 2 3\ncat 1 2\n", 2, "2 numbers after the word, but the vectors have 3"),
        ("the 1 2 3\ncat 1 2 3 4\n", 2, "4 numbers after the word, but the vectors have 3"),
        ("the 1 2 3\ncat\n", 2, "0 numbers"),
        ("the 1 2 3\ncat  1 2\n", 2, "2 numbers"),  # a second space is not a number
        ("the 1 2 3\ncat 1 x 3\n", 2, "'x' is not a number"),
        ("the 1 2 3\ncat 1 nan 3\n", 2, "nan in the vector of 'cat' is not finite"),
        ("the 1 2 3\ncat 1 2 inf\n", 2, "inf in the vector of 'cat' is not finite"),
        ("the 1 2 3\ncat 1 2 1e99\n", 2, "1e99 in the vector of 'cat' is not finite"),
        ("1 3\nthe 1 2 3\ncat 0,1 0,2 0,3\n", 3, "'0,1' is not a number"),
        ("cat 0,1 0,2 0,3\n", 1, "'cat 0,1 0,2 0,3' is not a word and its numbers"),
        ("The cat sat.\n", 1, "is not a word and its numbers"),
        ("\nthe 1 2 3\n", 1, "'' is not a word and its numbers"),
        ("the 1 2 3 4\n", 1, "vectors of width 4, but the embeddings have width 3; change model.d_model"),
        ("1 1000\nthe 1 2 3\n", 1, "vectors of width 1,000, but"),
        ("1 2\nthe 1 2 3\n", 1, "vectors of width 2, but"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, content: str, line: int, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / "v.vec", content=content)
    assert str(caught.value).startswith(f"{tmp_path / 'v.vec'}, line {line}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "v.vec has no word vectors"),
        (b"\xef\xbb\xbf", "v.vec, line 1: '' is not"),
        (b"10 3\n", "v.vec has no word vectors"),
        (b"10 3\nthe \x00\x00\x80\x3f\x00\x00\x00\x40", "v.vec is binary or UTF-16, not text"),
        (GLOVE.encode("utf-16"), "v.vec is binary or UTF-16, not text"),
    ],
)
def test_a_file_without_vectors_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(tmp_path / "v.vec", content=content)


def test_missing_files_folders_and_cut_gzip_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link.vec").symlink_to(tmp_path / "gone.vec")
    (tmp_path / "v.vec.gz").write_bytes(gzip.compress(GLOVE.encode() * 99)[:-20])
    for name, problem in [("link.vec", "no file"), ("", "is a folder"), ("v.vec.gz", "ends in the middle")]:
        with pytest.raises(DataError, match=problem):
            read(tmp_path / name)
    (tmp_path / "v.vec").write_text(GLOVE, "utf-8")
    (tmp_path / "link.vec").unlink()
    (tmp_path / "link.vec").symlink_to(tmp_path / "v.vec")
    assert list(read(tmp_path / "link.vec")) == ["the", "cat"]


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_vectors, "LONGEST", 50)
    monkeypatch.setattr(word_vectors, "_BLOCK", 4)
    with pytest.raises(DataError, match=r"line 3: longer than 50 bytes"):
        read(tmp_path / "v.vec", content=GLOVE + "9" * 99)


def test_a_few_words_cut_within_a_character_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "v.vec"
    path.write_bytes(b"4 3\nthe 1 2 3\n\xe5\x8c 1 2 3\n 1 2 3\ncat 4 5 6\n")
    file = WordVectors(path, 3)
    assert [entry.word for entry in file] == ["the", "cat"]
    assert file.unreadable == [3, 4]
    assert file.notes() == ["2 lines are left out because their word is empty or not UTF-8, the first is line 3"]


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    lines = [f"wort{number} 1 2 3" for number in range(900)]
    lines[5::40] = [f"wörter{number} 1 2 3" for number in range(len(lines[5::40]))]
    with pytest.raises(DataError, match=r"v.vec, line 6: the word is not UTF-8, as in 11 of the first 406 lines"):
        read(tmp_path / "v.vec", content="\n".join(lines).encode("latin-1"))
    assert len(read(tmp_path / "v.vec", content="\n".join(lines))) == 900


def test_a_header_with_another_number_of_words_is_noted(tmp_path: Path) -> None:
    (tmp_path / "v.vec").write_text("2000000 3\n" + GLOVE, "utf-8")
    file = WordVectors(tmp_path / "v.vec", 3)
    assert len(list(file)) == file.lines == 2
    assert file.notes() == ["its first line announces 2,000,000 words, and it has 2"]


def test_progress_counts_mebibytes_of_a_file_and_a_pipe_is_read(tmp_path: Path) -> None:
    shown: list[tuple[str, int | None]] = []

    def progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
        shown.append((what, total))
        return items

    (tmp_path / "v.vec").write_text(GLOVE * 100_000, "utf-8")
    assert sum(1 for _ in WordVectors(tmp_path / "v.vec", 3, progress)) == 200_000
    reader, writer = os.pipe()
    os.write(writer, GLOVE.encode())
    os.close(writer)
    assert [entry.word for entry in WordVectors(Path(f"/dev/fd/{reader}"), 3, progress)] == ["the", "cat"]
    os.close(reader)
    assert [total for _, total in shown] == [3, None]
    assert shown[0][0] == "reading v.vec (MiB)"
