import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from mtkit.data import chunks
from mtkit.data import prepare as module
from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.data.report import summary
from mtkit.errors import DataError, MtkitError
from mtkit.recipe.data import Cleaning, Corpus, DataSettings, Grammar, TokenizerSettings
from mtkit.text.corpora import SegmentPair, read_corpus
from mtkit.text.tokenizer import Tokenizer
from mtkit.text.tokenizer_training import train_tokenizer
from tests.data.conftest import WritePair

SOURCE = b"".join(b"the %d dogs see a house\n" % number for number in range(60))
TARGET = b"".join(b"die %d Hunde sehen ein Haus\n" % number for number in range(60))


@pytest.fixture
def settings(write_pair: WritePair, tmp_path: Path) -> DataSettings:
    return DataSettings(
        folder=tmp_path / "data",
        train=write_pair("train", SOURCE, TARGET),
        valid=write_pair("valid", b"a dog\nthe house\n", b"ein Hund\ndas Haus\n"),
    )


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "prepared.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_same_again_does_nothing(settings: DataSettings) -> None:
    first = prepare(settings)
    written = {path: path.stat().st_mtime_ns for path in settings.folder.rglob("*")}
    again = prepare(settings)
    assert (first.unchanged, again.unchanged) == (False, True)
    assert again.record == first.record
    assert written == {path: path.stat().st_mtime_ns for path in settings.folder.rglob("*")}


def test_text_is_known_by_content_not_by_name(settings: DataSettings, write_pair: WritePair) -> None:
    prepare(settings)
    assert prepare(settings.model_copy(update={"train": (write_pair("copy", SOURCE, TARGET),)})).unchanged
    with pytest.raises(DataError, match="train: other content"):
        prepare(settings.model_copy(update={"train": (write_pair("other", SOURCE.upper(), TARGET),)}))


def test_other_settings_are_refused_with_the_differences_unless_told_to_overwrite(settings: DataSettings) -> None:
    prepare(settings)
    before = _files(settings.folder)
    other = settings.model_copy(update={"tokenizer": TokenizerSettings(joint=False)})
    with pytest.raises(DataError, match=r"tokenizer\.joint: True -> False.*--overwrite.*--data"):
        prepare(other)
    assert _files(settings.folder) == before
    prepare(other, overwrite=True)
    opened = open_prepared(settings.folder)
    assert not opened.tokenizers.joint
    assert opened.settings.tokenizer == other.tokenizer


@pytest.mark.parametrize("foreign", ["notes.txt", "tokenizer/mine.model", "other.arrow"])
@pytest.mark.parametrize("damaged", [False, True])
def test_what_prepare_did_not_write_is_never_deleted(settings: DataSettings, foreign: str, damaged: bool) -> None:
    prepare(settings)
    (settings.folder / foreign).write_text("mine")
    assert prepare(settings).unchanged
    if damaged:
        (settings.folder / "prepared.json").write_text("{")
    before = _files(settings.folder)
    other = settings.model_copy(update={"tokenizer": TokenizerSettings(joint=False)})
    with pytest.raises(DataError, match=rf"{foreign}.*did not write.*another folder"):
        prepare(other, overwrite=True)
    assert _files(settings.folder) == before
    (settings.folder / foreign).unlink()
    prepare(other, overwrite=True)
    assert not open_prepared(settings.folder).tokenizers.joint


def test_what_comes_while_data_is_prepared_is_not_deleted_either(settings: DataSettings) -> None:
    prepare(settings)

    def progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
        (settings.folder / "notes.txt").write_text("mine")
        return items

    with pytest.raises(DataError, match=r"notes\.txt"):
        prepare(settings, overwrite=True, progress=progress)
    assert (settings.folder / "notes.txt").read_text() == "mine"


def test_all_that_prepare_writes_may_be_replaced(tmp_path: Path) -> None:
    """The text of the built-in corpus, and test sides that the new settings do not have."""
    builtin = {"train": 60, "valid": 4, "test": 4}
    grammar = DataSettings.model_validate({"folder": tmp_path / "data", "builtin": builtin})
    prepare(grammar)
    prepare(grammar.model_copy(update={"builtin": Grammar(train=61, valid=4, test=4)}), overwrite=True)
    assert len(open_prepared(tmp_path / "data").train) <= 61


def test_two_runs_write_the_same_files_and_fingerprint(settings: DataSettings, tmp_path: Path) -> None:
    one, two = prepare(settings), prepare(settings.model_copy(update={"folder": tmp_path / "again"}))
    assert _files(tmp_path / "again") == _files(settings.folder)
    assert one.record["fingerprint"] == two.record["fingerprint"]


def test_empty_pairs_leave_training_but_not_the_other_sides(settings: DataSettings, write_pair: WritePair) -> None:
    odd_source = "one\n\n \ntwo\u2028three\r\n\x00\x01\n".encode()
    odd_target = b"eins\nzwei\ndrei\n\nvier"
    odd = settings.model_copy(
        update={
            "train": (write_pair("odd", SOURCE + odd_source, TARGET + odd_target),),
            "test": {"test": (write_pair("test", odd_source, odd_target),)},
            "cleaning": Cleaning(overlap=False),
        }
    )
    record = prepare(odd).record
    opened = open_prepared(odd.folder)
    assert record["sides"]["train"]["left_out"]["empty"] == 4  # a source of control characters is empty too
    assert opened.train.lines.tolist() == [*range(1, 62)]
    assert opened.test is not None
    assert list(opened.test.source_text or ()) == ["one", "", " ", "two\u2028three", "\x00\x01"]
    assert list(opened.test.target_text or ()) == ["eins", "zwei", "drei", "", "vier"]
    assert opened.test.source.lengths[1] == 0


def test_without_test_files_there_is_no_test_side(settings: DataSettings) -> None:
    prepare(settings)
    assert open_prepared(settings.folder).test is None


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\nc\n", b"x\ny\nz\n", "3 usable training pairs"),
        (SOURCE.replace(b"\n", b"\r"), TARGET.replace(b"\n", b"\r"), r'1 usable .*lines contain "\\r": if these are'),
        (SOURCE, b"\n" * 60, "0 usable training pairs"),
        (SOURCE, TARGET + b"mehr\n", "has 60 lines and .* has 61"),
        (SOURCE, b"", "has 0"),
        (SOURCE, TARGET.replace(b"12 Hunde", b"12 H\xe4nde"), "line 13: not UTF-8"),
    ],
)
def test_bad_text_is_one_line_and_leaves_nothing(
    settings: DataSettings, write_pair: WritePair, source: bytes, target: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepare(settings.model_copy(update={"train": (write_pair("bad", source, target),)}))
    assert "\n" not in str(caught.value)
    assert {path.suffix for path in settings.folder.parent.iterdir()} == {".en", ".de"}


def test_text_with_a_name_that_is_too_long_is_not_mistaken_for_the_output(
    settings: DataSettings, write_pair: WritePair
) -> None:
    pair = write_pair("bad", SOURCE, TARGET)
    with pytest.raises(DataError, match=r"cannot read .*: File name too long; give a shorter name"):
        prepare(settings.model_copy(update={"train": (pair.model_copy(update={"target": Path("x" * 300)}),)}))


def test_sides_that_part_are_refused_with_the_line_unless_told_to_take_them(
    settings: DataSettings, write_pair: WritePair
) -> None:
    text = [f"on {'very ' * (line * 7 % 11)}old day {line} we met {line * 37} dogs" for line in range(200)]
    parted = write_pair("parted", "\n".join(text).encode(), "\n".join([*text[:60], *text[61:], "end"]).encode())
    for side in ({"train": (parted,)}, {"test": {"news": (parted,)}}):
        changed = settings.model_copy(update=side)
        with pytest.raises(DataError, match=r"parted\.en and .*parted\.de: from about line 6\d on") as caught:
            prepare(changed)
        assert "\n" not in str(caught.value)
        assert not settings.folder.exists()
    report = prepare(changed.model_copy(update={"cleaning": Cleaning(misaligned=True)}))
    assert (
        f"seem not to match from about line {report.record['sides']['news']['corpora'][0]['suspicious_line']}"
        in summary(report, 1024)
    )


def test_where_only_samples_are_looked_at_the_stretch_that_was_not_is_named(
    settings: DataSettings, write_pair: WritePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_ALIGNED", 100)
    monkeypatch.setattr(chunks, "_ALIGNED_IN_CHUNK", 60)
    monkeypatch.setattr(chunks, "_PAIRS", 100)
    text = [f"on {'very ' * (line * 7 % 11)}old day {line} we met {line * 37} dogs" for line in range(400)]
    parted = write_pair("parted", "\n".join(text).encode(), "\n".join([*text[:180], *text[181:], "end"]).encode())
    with pytest.raises(DataError, match=r"from somewhere between lines 160 and 20\d on"):
        prepare(settings.model_copy(update={"train": (parted,)}))


@pytest.mark.parametrize("size", [1, 3, 8, 16])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_an_impossible_vocabulary_is_refused(
    settings: DataSettings, size: int, kind: Literal["bpe", "unigram"]
) -> None:
    wanted = TokenizerSettings(vocabulary=size, kind=kind)
    with pytest.raises(DataError, match=rf"vocabulary = {size} is too small.*need \d+ pieces; choose \d+ or more"):
        prepare(settings.model_copy(update={"tokenizer": wanted}))
    assert not settings.folder.exists()


def test_a_failure_in_the_middle_leaves_the_old_data(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(settings)
    before = _files(settings.folder)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.SideWriter, "write", fail)
    with pytest.raises(MtkitError, match="No space left on device"):
        prepare(settings, overwrite=True)
    assert _files(settings.folder) == before
    assert [path.name for path in settings.folder.parent.iterdir() if path.is_dir()] == ["data"]


def test_folders_that_hold_something_else_are_never_replaced(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    for folder in (tmp_path / "photos", tmp_path / "train.en"):
        with pytest.raises(DataError, match="is not prepared data"):
            prepare(settings.model_copy(update={"folder": folder}), overwrite=True)
    with pytest.raises(DataError, match="is a file, not a folder"):
        prepare(settings.model_copy(update={"folder": tmp_path / "train.en" / "data"}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match="is the current folder"):
        prepare(settings.model_copy(update={"folder": Path()}))
    prepare(settings)
    inside = Corpus(source=settings.folder / "train.arrow", target=settings.train[0].target)
    with pytest.raises(DataError, match="lies in"):
        prepare(settings.model_copy(update={"train": (inside,)}), overwrite=True)
    assert os.path.exists(tmp_path / "photos" / "cat.png")


def test_the_built_in_corpus_only_goes_from_english_to_german(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="en to de, not de to en"):
        prepare(DataSettings(folder=tmp_path / "data", source_language="de", target_language="en"))


def test_the_built_in_corpus_is_known_by_its_draw(builtin: Prepared) -> None:
    settings = builtin.settings
    assert prepare(settings).unchanged
    with pytest.raises(DataError, match=r"builtin\.seed: 1 -> 2"):
        prepare(settings.model_copy(update={"builtin": settings.builtin.model_copy(update={"seed": 2})}))


def test_a_built_in_corpus_too_small_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.builtin\.train gives 5"):
        prepare(DataSettings(folder=tmp_path / "data", builtin=Grammar(train=5)))


@pytest.mark.data
def test_real_text_is_prepared(tmp_path: Path) -> None:
    text = Path(os.environ["MTKIT_DATA"]) / "multi30k"
    pairs = {
        side: Corpus(source=text / f"{name}.en", target=text / f"{name}.de")
        for side, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr"))
    }
    record = prepare(DataSettings.model_validate({"folder": tmp_path / "data", **pairs})).record
    assert {name: side["rows"] for name, side in record["sides"].items()} == {
        "train": 29_000,
        "valid": 1_014,
        "test": 1_000,
    }
    assert record["vocabulary"] == {"source": 8_000, "target": 8_000}
    assert record["sides"]["test"]["bytes"]["source"] < 0.01 * record["sides"]["test"]["pieces"]["source"]


@pytest.mark.parametrize("builtin", [True, False])
def test_tokenizers_of_large_corpora_are_trained_on_a_sample(
    tmp_path: Path, builtin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory does not grow with the corpus."""
    settings = DataSettings(folder=tmp_path / "data", builtin=Grammar(train=400, valid=30, test=20))
    if not builtin:
        prepare(settings)
        text = {side: tmp_path / "data" / "text" / f"train.{side}" for side in ("en", "de")}
        corpus = Corpus(source=text["en"], target=text["de"])
        cleaning = Cleaning(overlap=False)
        settings = DataSettings(folder=tmp_path / "other", train=(corpus,), valid=(corpus,), cleaning=cleaning)
    seen: list[int] = []

    def train(path: Path, lines: Iterable[str], *rest: Any) -> Tokenizer:
        seen.append(len(list(lines)))
        return train_tokenizer(path, lines, *rest)

    monkeypatch.setattr("mtkit.data.vocabulary.train_tokenizer", train)
    monkeypatch.setattr("mtkit.data.vocabulary._BYTES", 10_000)
    monkeypatch.setattr("mtkit.data.vocabulary._BLOCK", 500)
    prepare(settings)
    assert 50 < seen[0] < 400  # of 800 lines, some 40,000 bytes


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("shards", [1, 1_000_000])
def test_training_text_is_read_once_besides_what_trains_the_tokenizer(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, plain: bool, shards: int
) -> None:
    """A streamed data set is a download each time, and a vocabulary too large for the text takes several attempts.

    The first lines of a table, from which its language is guessed, do not count: only readings to the end do.
    """
    monkeypatch.setattr("mtkit.data.shards.PAIRS", shards)
    monkeypatch.setattr("mtkit.data.resolve._SAMPLE", 10)
    monkeypatch.setattr("mtkit.data.vocabulary._BYTES", 1_000)
    monkeypatch.setattr("mtkit.data.vocabulary._BLOCK", 100)
    if not plain:
        pairs = [pair for corpus in settings.train for pair in read_corpus(corpus)]
        table = tmp_path / "train.jsonl"
        table.write_text("".join(f"{json.dumps({'en': each.source, 'de': each.target})}\n" for each in pairs))
        settings = settings.model_copy(update={"train": (Corpus(file=table, source="en", target="de"),)})
    if given:
        prepare(settings.model_copy(update={"folder": tmp_path / "first"}))
        settings = settings.model_copy(update={"tokenizer_from": tmp_path / "first"})
    readings = list[Corpus]()

    def counted(corpus: Corpus, *rest: Any, **others: Any) -> Iterator[SegmentPair]:
        yield from read_corpus(corpus, *rest, **others)
        readings.append(corpus)

    for reader in ("text.corpora", "data.resolve", "data.vocabulary", "data.chunks"):
        monkeypatch.setattr(f"mtkit.{reader}.read_corpus", counted)
    record = prepare(settings).record
    assert record["vocabulary"]["source"] < settings.tokenizer.vocabulary // 8 * 8
    once = [*settings.train]
    assert [corpus for corpus in readings if corpus in settings.train] == (once if given or plain else once * 2)
    assert all(readings.count(corpus) == 1 for corpus in settings.valid)
    readings.clear()
    assert prepare(settings).unchanged
    assert [corpus for corpus in readings if corpus in settings.train] == once


def test_chunks_of_which_nothing_is_kept_are_read_back(
    settings: DataSettings, write_pair: WritePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of the text, all of another corpus, and a held-out side of blank lines."""
    monkeypatch.setattr(chunks, "_PAIRS", 20)
    blank, again = write_pair("blank", SOURCE + b"\n", TARGET + b"\n"), write_pair("again", SOURCE, TARGET)
    prepare(
        settings.model_copy(
            update={
                "train": (blank, again),
                "test": {"nothing": (write_pair("nothing", b"\n\n", b"\n\n"),)},
                "cleaning": Cleaning(duplicates=True),
            }
        )
    )
    prepared = open_prepared(settings.folder)
    assert len(prepared.train) == 60
    pieces = prepared.tokenizers.source
    assert pieces.decode(prepared.train.source[59].tolist()) == "the 59 dogs see a house"
    assert len(prepared.tests["nothing"]) == 2
