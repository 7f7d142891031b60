import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from mtkit.errors import DataError
from mtkit.text import text_files
from mtkit.text.corpora import measure_file
from mtkit.text.text_files import Lines, Repairs, Span, decode_lines, read_lines

CONTENTS = pytest.mark.parametrize(
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


@CONTENTS
def test_only_a_newline_ends_a_line(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert list(Lines(path)) == lines
    assert measure_file(path).lines == len(lines)


@CONTENTS
def test_a_gzipped_file_reads_like_a_plain_one(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(content))
    assert list(Lines(path)) == lines


@pytest.mark.parametrize(
    ("content", "line"), [(b"a" * 99, 1), (b"a\n" + b"b" * 99, 2), (b"a\n" + b"b" * 99 + b"\nc\n", 2)]
)
def test_a_line_that_never_ends_is_no_text(
    tmp_path: Path, content: bytes, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of /dev/zero, which memory would not hold."""
    monkeypatch.setattr(text_files, "LONGEST", 50)
    monkeypatch.setattr(text_files, "_BLOCK", 4)
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"line {line}: longer than"):
        list(Lines(path))
    with path.open("rb") as file, pytest.raises(DataError, match=f"standard input, line {line}: longer than"):
        list(decode_lines(read_lines(file), "standard input"))


@CONTENTS
def test_lines_are_the_same_wherever_blocks_of_the_file_end(
    tmp_path: Path, content: bytes, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"first\n" + content + b"\n" * (not content.endswith(b"\n")) + b"last")
    repairs = Repairs()
    expected = list(Lines(path, repairs))
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(text_files, "_BLOCK", size)
        counted = Repairs()
        assert (list(Lines(path, counted)), counted) == (expected, repairs)
    (tmp_path / "latin").write_bytes(b"a\n\nb\n\xe4\n")
    with pytest.raises(DataError, match=r"latin, line 4: not UTF-8 \(byte 1 is 0xe4\)"):
        list(Lines(tmp_path / "latin"))


def test_lines_are_read_anew_by_each_loop(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\nb\n")
    lines = Lines(tmp_path / "text")
    assert list(lines) == list(lines) == ["a", "b"]


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffa\r\nb\n\ufeffc\r\nd\re\r".encode())
    repairs = Repairs()
    assert list(Lines(tmp_path / "text", repairs)) == ["a", "b", "\ufeffc", "d\re"]
    assert repairs == Repairs(carriage_returns=3, byte_order_marks=1)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    latin = "gut\nschön\n".encode("latin1")
    (tmp_path / "latin").write_bytes(latin)
    (tmp_path / "latin.gz").write_bytes(gzip.compress(latin))
    for name in ("latin", "latin.gz"):
        with pytest.raises(DataError, match=rf"{name}, line 2: not UTF-8 \(byte 4 is 0xf6\)"):
            list(Lines(tmp_path / name))
    with pytest.raises(DataError, match=r"latin, line 2: not UTF-8"):
        list(Lines(tmp_path / "latin", span=Span(4, 10, before=1)))


@pytest.mark.parametrize("cut", [1, 2])
def test_a_file_that_ends_within_a_character_is_cut_off(cut: int, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("天气\n今天".encode()[:-cut])
    with pytest.raises(
        DataError, match="text, line 2: the last line ends in the middle of a UTF-8 character; if the file is cut"
    ):
        list(Lines(tmp_path / "text"))


@pytest.mark.parametrize("encoding", ["latin1", "gb18030", "shift_jis"])
def test_no_encoding_is_assumed_of_text_that_is_not_utf8(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes({"latin1": "schön\n"}.get(encoding, "今天\n").encode(encoding))
    with pytest.raises(DataError, match=rf"from its real encoding, as .*{encoding}"):
        list(Lines(tmp_path / "text"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"a\n"), r"text is compressed by gzip without a \.gz name; rename it, or"),
        (lzma.compress(b"a\n"), r"text is compressed by xz; decompress it with `xz -dc`"),
        (bz2.compress(b"a\n"), r"text is compressed by bzip2; decompress it with `bzip2 -dc`"),
        (b"\x28\xb5\x2f\xfd\x04", r"text is compressed by zstd; decompress it with `zstd -dc`"),
        (b"PK\x03\x04\xff", r"text is a ZIP file; extract its text, as with `unzip -p`"),
        ("a\n".encode("utf-16"), r"text is not UTF-8 but UTF-16; convert it with `iconv -f utf-16 -t utf-8`"),
    ],
    ids=["gzip", "xz", "bzip2", "zstd", "zip", "utf-16"],
)
def test_other_formats_are_told_from_other_encodings(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(Lines(tmp_path / "text"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["the dog\n", "a\r\nb\r\n", "schön\nx\n", "собака спит\nкошка\n"])
def test_utf16_without_a_byte_order_mark_is_told_from_text(text: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match="text is not UTF-8, but seems to be UTF-16 without a byte order mark"):
        list(Lines(tmp_path / "text"))


def test_nul_characters_within_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\0a\nb\0c\n\0\nd\0")
    assert list(Lines(tmp_path / "text")) == ["\0a", "b\0c", "\0", "d\0"]
    for content in (b"hello\0\nworld\n", b"hell\0\nworld\n", b"hello\n\0world\n", b"hello\n\0worl\n"):
        (tmp_path / "text").write_bytes(content)
        assert list(Lines(tmp_path / "text")) == content.decode().splitlines()


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"line {number}\n" for number in range(1000)).encode())
    flipped = whole[:200] + bytes([whole[200] ^ 0xFF]) + whole[201:]
    path = tmp_path / "text.gz"
    for damaged, what in (
        (whole[:-20], r"text\.gz ends in the middle of its gzip data"),
        (whole[:5], r"text\.gz ends in the middle of its gzip data"),
        (flipped, r"text\.gz is not a valid gzip file"),
        (b"plain text\n", r"text\.gz is not a valid gzip file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=what):
            list(Lines(path))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, what in (
        ("none", "no file .*; check the name"),
        ("empty", "is empty"),
        (".", "is a folder, not a text file; give a file"),
        ("x" * 300, "cannot read .*: File name too long; give a shorter name"),
        ("empty/x", "cannot read .*: Not a directory; .* check the name"),
        ("loop", "cannot read .*; .* give the file itself"),
    ):
        with pytest.raises(DataError, match=what):
            measure_file(tmp_path / name)
