from pathlib import Path

from mtkit.data.prepare import Report, prepare
from mtkit.data.prepared import Prepared
from mtkit.data.report import summary
from mtkit.recipe.data import DataSettings
from tests.data.conftest import WritePair


def test_the_summary_says_what_is_there_and_what_is_left_out(builtin: Prepared) -> None:
    text = summary(Report(builtin.folder, unchanged=False, record=builtin.record), max_length=10)
    assert [line.split()[:2] for line in text.splitlines()[3:6]] == [["train", "400"], ["valid", "30"], ["test", "20"]]
    assert f"{builtin.train.too_long(10):,} too long" in text
    assert f"{builtin.tokenizers.source.size} pieces, joint" in text
    pieces = int(builtin.train.source.lengths.sum())
    assert f"{pieces:,}" in text


def test_languages_without_spaces_have_no_words(tmp_path: Path, write_pair: WritePair) -> None:
    source = "".join(f"{number} 只狗看见房子。\n" for number in range(60)).encode()
    target = b"".join(b"the %d dogs see a house\n" % number for number in range(60))
    settings = DataSettings(
        folder=tmp_path / "data",
        source_language="zh-CN",
        target_language="en",
        train=write_pair("train", source, target),
        valid=write_pair("valid", "一只狗\n".encode(), b"a dog\n"),
    )
    head, train, *_ = summary(prepare(settings), max_length=1_024).splitlines()[2:]
    assert head.split()[1:5] == ["words", "zh-CN", "words", "en"]
    _, segments, *words, pieces, _, ratio, other = train.split()
    assert [segments, *words] == ["60", "-", "360"]
    assert int(pieces) > 60
    assert ratio == "-"
    assert float(other) >= 1


def test_the_summary_says_when_nothing_was_done(builtin: Prepared) -> None:
    assert "up to date" in summary(Report(builtin.folder, unchanged=True, record=builtin.record), max_length=1_024)


def test_the_summary_says_what_was_put_right_and_what_cannot_be_spelt(tmp_path: Path, write_pair: WritePair) -> None:
    text = b"".join(b"the %d dogs see a house\n" % number for number in range(60))
    odd = "a dog\r\nthe\u2028house \u65e5\u672c\n a\rdog\n".encode()
    settings = DataSettings(
        folder=tmp_path / "data",
        train=write_pair("train", b"\xef\xbb\xbf" + text, text),
        valid=write_pair("valid", odd, b"ein Hund\ndas Haus\nder Hund\n"),
    )
    lines = summary(prepare(settings), max_length=1_024).splitlines()
    (repairs,) = (line for line in lines if line.startswith("text:"))
    assert "1 carriage returns at line ends dropped" in repairs
    assert "1 carriage returns kept within lines" in repairs
    assert "1 byte order marks dropped" in repairs
    assert "1 U+2028 and U+2029 kept within lines" in repairs
    (spelt,) = (line for line in lines if line.startswith("  valid, source of en-de: bytes "))
    assert float(spelt.split("bytes ")[1].split("%")[0]) > 5
    assert not any(line.startswith("  train, ") for line in lines)
