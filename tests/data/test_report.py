import copy
import itertools
from pathlib import Path

import numpy as np

from mtkit.data.prepare import Report, prepare
from mtkit.data.prepared import Prepared
from mtkit.data.report import summary
from mtkit.recipe.data import DataSettings, TokenizerSettings
from tests.data.conftest import WritePair


def test_the_summary_says_what_is_there_and_what_is_left_out(builtin: Prepared) -> None:
    text = summary(Report(builtin.folder, unchanged=False, record=builtin.record), max_length=10)
    assert [line.split()[:2] for line in text.splitlines()[3:6]] == [["train", "400"], ["valid", "30"], ["test", "20"]]
    longest = builtin.train.source.lengths + 1, builtin.train.target.lengths + 1
    assert f"{(np.maximum(*longest) > 10).sum():,} too long (over 10 pieces with the end mark)" in text
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
    lines = summary(prepare(settings), max_length=1_024).splitlines()
    head, train, *_ = lines[lines.index("") + 1 :]
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
    assert "1 carriage returns within lines" in repairs
    assert "1 byte order marks dropped" in repairs
    assert "1 U+2028 and U+2029 within lines" in repairs
    (spelt,) = (line for line in lines if line.startswith("  valid, source of en-de: bytes "))
    assert float(spelt.split("bytes ")[1].split("%")[0]) > 5
    assert not any(line.startswith("  train, ") for line in lines)
    assert "warning: valid has 3 lines; scores of fewer than 100 lines vary much, so give more" in lines


def test_damaged_text_and_a_large_vocabulary_are_warned_of(tmp_path: Path, write_pair: WritePair) -> None:
    words = ["".join(pair) for pair in itertools.product("bdfgklmn", "aeiou", "prst", "aeio")]
    source = "".join(f"{words[number % 640]} {words[number * 7 % 640]} sleeps\n" for number in range(640))
    target = source.replace("sleeps", "schl&auml;ft", 2).replace("sleeps", "schlÃ¤ft", 1)
    settings = DataSettings(
        folder=tmp_path / "data",
        train=write_pair("train", source.replace("sleeps", "slee@@ ps\u200b", 3).encode(), target.encode()),
        valid=write_pair("valid", b"a dog\n", b"ein Hund\n"),
        tokenizer=TokenizerSettings(vocabulary=2_000),
    )
    report = prepare(settings)
    lines = summary(report, max_length=1_024).splitlines()
    told = [line for line in lines if line.startswith("warning: ")]
    for start in (
        "warning: 2 target lines of train (from line 1 on) have HTML entities",
        "warning: 1 target lines of train (from line 3 on) have characters of a wrong decoding",
        "warning: 3 source lines of train (from line 1 on) have control or invisible characters: in sources they",
        "warning: 3 source lines of train (from line 1 on) have @@ between pieces of words",
        "warning: the joint vocabulary is large for this text: ",
    ):
        assert sum(line.startswith(start) for line in told) == 1, start
    size = int(told[-1].split("--vocabulary ")[1].split()[0])
    smaller = settings.model_copy(
        update={"folder": tmp_path / "small", "tokenizer": TokenizerSettings(vocabulary=size)}
    )
    assert not any("is large for" in line for line in summary(prepare(smaller), max_length=1_024).splitlines())
    words_of = {"folder": tmp_path / "words", "tokenizer": TokenizerSettings(kind="words", vocabulary=600)}
    whole = prepare(settings.model_copy(update=words_of))
    assert not any("is large for" in line for line in summary(whole, max_length=1_024).splitlines())


def test_a_vocabulary_of_rare_characters_is_not_too_large(tmp_path: Path, write_pair: WritePair) -> None:
    characters = [chr(code) for code in range(0x4E00, 0x4E00 + 600)]
    text = "".join("".join(characters[number * 7 % 600 :][:9]) + "\n" for number in range(300)).encode()
    settings = DataSettings(
        folder=tmp_path / "data",
        source_language="zh",
        target_language="zh",
        train=write_pair("train", text, text),
        valid=write_pair("valid", "一\n".encode(), "一\n".encode()),
        tokenizer=TokenizerSettings(vocabulary=900),
    )
    assert "is large for this text" not in summary(prepare(settings), max_length=1_024)


def test_a_smaller_vocabulary_is_advised_only_if_there_is_one(builtin: Prepared) -> None:
    record = copy.deepcopy(builtin.record)
    size = record["vocabulary"]["source"]
    for enough, advised in ((size - 8, True), (size - 7, False), (size, False)):
        record["sides"]["train"]["use"] = {"joint": {"used": 100, "rare": 90, "enough": enough}}
        text = summary(Report(builtin.folder, unchanged=False, record=record), max_length=1_024)
        assert (f"try --vocabulary {enough}" in text) == ("is large for" in text) == advised


def test_a_few_odd_lines_are_noted_and_plain_text_is_not(builtin: Prepared) -> None:
    record = copy.deepcopy(builtin.record)
    text = summary(Report(builtin.folder, unchanged=False, record=record), max_length=1_024)
    assert not any(line.startswith(("warning", "note")) for line in text.splitlines())
    record["inputs"]["train"] = {"sha256": "", "lines": 20_000, "oddities": {"entities": {"source": [19, 4]}}}  # type: ignore[typeddict-unknown-key]
    text = summary(Report(builtin.folder, unchanged=False, record=record), max_length=1_024)
    assert "\nnote: 19 source lines of train (from line 4 on) have HTML entities" in text
    for quoted, told in ((10_000, False), (10_001, True)):
        record["inputs"]["train"]["oddities"] = {"quoted": {"target": [quoted, 2]}}
        text = summary(Report(builtin.folder, unchanged=False, record=record), max_length=1_024)
        assert (f"warning: {quoted:,} target lines of train (from line 2 on) have quotes around them" in text) == told


def test_the_summary_names_the_file_of_contrastive_pairs_and_whole_documents(tmp_path: Path) -> None:
    data = {"task": {"name": "names", "longest": 2, "train": 40, "valid": 4, "test": 4}, "folder": tmp_path / "data"}
    text = summary(prepare(DataSettings.model_validate(data)), max_length=1_024)
    assert f"context: {tmp_path / 'data' / 'contrastive.jsonl'}\n" in text
    assert "training fills rows with their segments, up to 1,000 pieces\n" in text
