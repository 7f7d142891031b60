"""Preparing in shards and in parts: the same bytes as at once, whatever was killed on the way."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.data.encode import Encoder
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.training_side import prepare_part
from mtkit.errors import DataError, MtkitError
from mtkit.recipe.data import Cleaning, Corpus, DataSettings, TokenizerSettings
from mtkit.storage.jobs import Part
from mtkit.text import corpora
from tests.damage import check_damages
from tests.data.conftest import WritePair

PAIRS = 230


def text(kind: str) -> tuple[bytes, bytes]:
    """Pairs of three languages, with blank lines, U+2028, duplicates far apart, and text that a tokenizer changes."""
    source, target = [], []
    for number in range(PAIRS):
        own = number if number % 9 else number // 90  # every ninth comes again, shards later
        source.append(f"the {own} dogs of {kind} see a house. They run.")
        target.append(("狗%d看见房子 。" if own % 3 else "犬%dが  家を見る\u2028。") % own)
    source[40], target[40] = "", "leer"
    source[77] = target[77] = "the same on both sides"
    source[100], target[100] = "held out", "vorbehalten"
    target[151] += " ▁"  # comes back as a space
    return "".join(f"{each}\n" for each in source).encode(), "".join(f"{each}\n" for each in target).encode()


@pytest.fixture
def settings(write_pair: WritePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    monkeypatch.setattr("mtkit.data.chunks._PAIRS", 10)
    first, second = (write_pair(f"train{kind}", *text(kind)) for kind in ("a", "b"))
    documents = second.model_copy(update={"documents": "empty-lines"})
    return DataSettings(
        folder=tmp_path / "data",
        source_language="en",
        target_language="de",  # whatever the script
        train=(first, documents),
        valid=write_pair("valid", b"held out\nthe house\n", b"vorbehalten\ndas Haus\n"),
        cleaning=Cleaning(misaligned=True, identical=True, overlap=True, duplicates=True),
        tokenizer=TokenizerSettings(vocabulary=400),
    )


def elsewhere(settings: DataSettings, name: str) -> DataSettings:
    return settings.model_copy(update={"folder": settings.folder.with_name(name)})


def written(folder: Path) -> dict[str, bytes]:
    """All that is in a prepared folder, but for the time that it took."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(files.pop("prepared.json"))
    assert record.pop("seconds") >= 0
    return {**files, "record": json.dumps(record).encode()}


@pytest.fixture
def whole(settings: DataSettings) -> dict[str, bytes]:
    """What one `prepare` without shards writes."""
    found = written(prepare(settings).folder)
    counts = open_prepared(settings.folder).record["sides"]["train"]
    assert all(counts["left_out"][reason] for reason in ("empty", "overlap", "duplicates", "identical"))
    assert counts.get("altered")
    return found


def test_shards_give_the_same_bytes(
    settings: DataSettings, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    other = elsewhere(settings, "other")
    assert written(prepare(other).folder) == whole
    assert not (other.folder.parent / "other.partial").exists()
    assert prepare(other).unchanged


KILLED = """
import json, os, signal, sys
from pathlib import Path
from mtkit.data import encode, prepare, shards
from mtkit.data import chunks
from mtkit.recipe.data import DataSettings
chunks._PAIRS, shards.PAIRS = 10, 100
own, made = encode.encode_chunk, 0
def encode_chunk(*arguments):
    global made
    made += 1
    if made == 33:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(*arguments)
encode.encode_chunk = encode_chunk
folder, settings = sys.argv[1:]
prepare.prepare(DataSettings.model_validate({**json.loads(settings), "folder": Path(folder)}))
"""


def test_killed_and_typed_again_it_goes_on_with_the_first_unfinished_shard(
    settings: DataSettings, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    other = elsewhere(settings, "killed")
    given = json.dumps(settings.model_dump(mode="json"))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(other.folder), given], check=False)
    assert ended.returncode == -signal.SIGKILL
    partial = other.folder.parent / "killed.partial"
    done = {path.name: path.stat().st_mtime_ns for path in partial.glob("shard-*.arrow")}
    assert sorted(done) == ["shard-1.arrow", "shard-2.arrow", "shard-3.arrow"]
    assert not other.folder.exists()
    encoded, own = list[int](), Encoder.encode

    def counted(encoder: Encoder, chunks: object) -> object:
        for chunk, found in own(encoder, chunks):  # type: ignore[arg-type]
            encoded.append(len(chunk.lines))
            yield chunk, found

    monkeypatch.setattr(Encoder, "encode", counted)
    assert written(prepare(other).folder) == whole
    assert sum(encoded) == 2 * PAIRS - 300 + 2  # the rest, and the validation side
    assert not partial.exists()


def test_what_is_left_of_other_text_is_not_taken(
    settings: DataSettings, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    part = Part(1, 1)
    folder, _ = prepare_part(settings.model_copy(update={"tokenizer": TokenizerSettings(vocabulary=360)}), part)
    other = elsewhere(settings, "other")
    shutil.move(folder, other.folder.parent / "other.partial")
    assert written(prepare(other).folder) == whole
    (other.folder.parent / "third.partial").mkdir()
    (other.folder.parent / "third.partial" / "mine").touch()
    with pytest.raises(DataError, match="is no part of prepared data"):
        prepare(elsewhere(settings, "third"))


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_join_to_what_one_prepare_writes(
    settings: DataSettings, whole: dict[str, bytes], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 70)
    other = elsewhere(settings, "joined")
    counts = [prepare_part(other, Part(number, parts))[1] for number in range(parts, 0, -1)]
    assert sum(counts) == 2 * PAIRS
    shard = other.folder.parent / f"joined.part-1-of-{parts}" / "shard-1.arrow"
    before = shard.stat().st_mtime_ns
    assert prepare_part(other, Part(1, parts))[1] == counts[-1]
    assert shard.stat().st_mtime_ns == before
    assert written(prepare(other, join=True).folder) == whole
    assert prepare(other, join=True).unchanged


def test_more_parts_than_chunks_join_too(
    settings: DataSettings, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.chunks._PAIRS", 200)
    other = elsewhere(settings, "many")
    # chunks of 200, 30, 200 and 30 pairs, as they begin in fifths of 460
    assert [prepare_part(other, Part(number, 5))[1] for number in range(1, 6)] == [200, 0, 230, 0, 30]
    joined = open_prepared(prepare(other, join=True).folder)
    assert joined.train.lines.tolist() == open_prepared(settings.folder).train.lines.tolist()
    assert whole


def test_joining_is_refused_where_parts_do_not_fit(settings: DataSettings) -> None:
    for number in (1, 2, 3):
        prepare_part(settings, Part(number, 3))
    parts = [Part(number, 3).output(settings.folder) for number in (1, 2, 3)]
    kept = settings.folder.with_name("kept")

    def refused(match: str, settings: DataSettings = settings) -> None:
        with pytest.raises(DataError, match=match) as error:
            prepare(settings, join=True)
        assert "\n" not in str(error.value)
        assert not settings.folder.exists()

    refused("no parts of .*other", elsewhere(settings, "other"))
    parts[1].rename(kept)
    refused(r"of 3 parts of .*, 1 are missing or not finished: 2; prepare with --part 2/3")
    shutil.copytree(parts[0], parts[1])
    refused(r"part-2-of-3 holds part 1/3, not 2/3; prepare it again with --part 2/3")
    shutil.rmtree(parts[1])
    prepare_part(settings.model_copy(update={"cleaning": Cleaning(misaligned=True, overlap=False)}), Part(2, 3))
    refused(r"part 2/3 was prepared with other settings \(.*cleaning\.overlap: False -> True")
    shutil.rmtree(parts[1])
    kept.rename(parts[1])
    (parts[1] / "shard-1.arrow").rename(kept)
    refused(r"part 2/3 is incomplete: a shard of .* is missing")
    kept.rename(parts[1] / "shard-1.arrow")
    model = parts[2] / "tokenizer" / "joint.model"
    model.write_bytes(model.read_bytes() + b"0")
    refused("part 3/3 has another tokenizer than part 1")
    (settings.folder.parent / "data.part-1-of-2").mkdir()
    refused("has parts of 2 and of 3; remove the parts that are not wanted")


def test_a_damaged_shard_is_named(settings: DataSettings) -> None:
    prepare_part(settings, Part(1, 1))
    shard = Part(1, 1).output(settings.folder) / "shard-1.arrow"
    shard.write_bytes(shard.read_bytes()[:3_000])
    with pytest.raises(DataError, match=r"shard-1.arrow is damaged; remove it and prepare its part again"):
        prepare(settings, join=True)


def test_typed_again_a_damaged_shard_is_made_again(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    folder, _ = prepare_part(settings, Part(1, 1))
    before = {path: path.read_bytes() for path in folder.glob("shard-*.arrow")}
    for number, left in ((2, 3_000), (4, 0)):
        path = folder / f"shard-{number}.arrow"
        path.write_bytes(before[path][:left])
    prepare_part(settings, Part(1, 1))
    assert {path: path.read_bytes() for path in folder.glob("shard-*.arrow")} == before


def changed(settings: DataSettings, line: bytes, other: bytes) -> None:
    """Write another line in place of one of the second corpus, which is as long."""
    path = Path(str(settings.train[1].source))
    before = path.read_bytes()
    assert before.count(line) == 1
    assert len(line) == len(other)
    path.write_bytes(before.replace(line, other))


def test_of_text_that_changed_since_only_what_is_made_of_it_is_made_again(
    settings: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus with a damaged line is mended, and the same command typed again."""
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    prepare(settings.model_copy(update={"folder": settings.folder.with_name("lender")}))
    borrowing = settings.model_copy(update={"tokenizer_from": settings.folder.with_name("lender")})
    one = Part(1, 1)
    folder, _ = prepare_part(elsewhere(borrowing, "first"), one)
    shutil.move(folder, settings.folder.with_name("data.partial"))
    changed(settings, b"\nthe 133 dogs", b"\nthe 133 cats")
    encoded, own = list[int](), Encoder.encode

    def counted(encoder: Encoder, chunks: object) -> object:
        for chunk, found in own(encoder, chunks):  # type: ignore[arg-type]
            encoded.append(len(chunk.lines))
            yield chunk, found

    shutil.copytree(settings.folder.with_name("data.partial"), settings.folder.with_name("first.part-1-of-1"))
    record = settings.folder.with_name("data.partial") / "part.json"
    assert json.loads(record.read_text())["part"] == "1/1"
    monkeypatch.setattr(Encoder, "encode", counted)
    found = written(prepare(borrowing).folder)
    assert sum(encoded) == 100 + 2  # shard 4, and the validation side
    assert found == written(prepare(elsewhere(borrowing, "anew")).folder)
    with pytest.raises(DataError, match="part 1/1 was prepared from other text; prepare it again with --part 1/1"):
        prepare(elsewhere(borrowing, "first"), join=True)


def test_a_tokenizer_of_other_text_is_made_again(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 100)
    folder, _ = prepare_part(elsewhere(settings, "first"), Part(1, 1))
    shutil.move(folder, settings.folder.with_name("data.partial"))
    changed(settings, b"\nthe 133 dogs", b"\nthe 133 cats")
    assert written(prepare(settings).folder) == written(prepare(elsewhere(settings, "anew")).folder)


def test_damaged_records_of_parts_are_no_parts(settings: DataSettings) -> None:
    folders = [prepare_part(settings, Part(number, 2))[0] for number in (1, 2)]

    def join() -> None:
        prepare(settings, join=True)
        shutil.rmtree(settings.folder)

    check_damages(folders[1] / "part.json", join, names=Path("2/2"), whole_keys=("about",))


def test_joining_text_that_has_grown_is_refused(settings: DataSettings) -> None:
    for number in (1, 2):
        prepare_part(settings, Part(number, 2))
    for side in (settings.train[1].source, settings.train[1].target):
        with Path(str(side)).open("ab") as file:
            file.write(b"more\n" * 20)
    with pytest.raises(DataError, match="continues after line 230, the last line of its parts; prepare them again"):
        prepare(settings, join=True)


def test_a_part_reads_its_own_share(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.text.text_files._BUFFER", 512)
    prepare(settings.model_copy(update={"folder": settings.folder.with_name("lender")}))
    plain = settings.model_copy(
        update={"train": settings.train[:1], "tokenizer_from": settings.folder.with_name("lender")}
    )
    read, own = list[int](), corpora.read_corpus

    def counted(*given: object, **others: object) -> object:
        for pair in own(*given, **others):  # type: ignore[arg-type]
            read.append(pair.line)
            yield pair

    for module in ("text.corpora", "data.vocabulary", "data.chunks"):
        monkeypatch.setattr(f"mtkit.{module}.read_corpus", counted)
    assert [prepare_part(plain, Part(number, 3))[1] for number in (2, 3, 1)] == [80, 70, 80]
    assert read == [*range(81, 161), *range(161, 231), *range(1, 81)]


def test_an_error_before_the_first_shard_leaves_nothing_where_the_tokenizer_is_given(
    settings: DataSettings, tmp_path: Path
) -> None:
    prepare(settings.model_copy(update={"folder": tmp_path / "lender"}))
    table = tmp_path / "bad.jsonl"
    table.write_text('{"en": "a", "de": "b"}\n' * 40 + '{"en": "a"}\n')
    bad = settings.model_copy(
        update={"train": (Corpus(file=table, source="en", target="de"),), "tokenizer_from": tmp_path / "lender"}
    )
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="line 41"):
        prepare(bad)
    assert sorted(tmp_path.iterdir()) == before
    table.write_text('{"en": "a", "de": "b"}\n' * 4)
    with pytest.raises(DataError, match="hold 1 usable training pairs"):
        prepare(bad)
    assert sorted(tmp_path.iterdir()) == before


def test_sides_that_do_not_match_are_refused_before_all_is_encoded(settings: DataSettings, tmp_path: Path) -> None:
    lines = [f"{number} {'word ' * (number * 7 % 23)}\n" for number in range(300)]
    (tmp_path / "off.en").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "off.de").write_text("".join([*lines[:150], *lines[151:], "1\n"]), encoding="utf-8")
    corpus = Corpus(source=tmp_path / "off.en", target=tmp_path / "off.de")
    off = settings.model_copy(update={"train": (corpus,), "cleaning": Cleaning()})
    with pytest.raises(DataError, match="lines go better with their neighbour's translation"):
        prepare_part(off, Part(1, 1))


def test_the_built_in_corpus_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match="built-in text is not prepared in parts"):
        prepare_part(DataSettings(folder=tmp_path / "data"), Part(1, 2))
    with pytest.raises(MtkitError, match="built-in text is not prepared in parts"):
        prepare(DataSettings(folder=tmp_path / "data"), join=True)


def test_a_link_in_the_place_of_the_shards_is_refused(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.shards.PAIRS", 10)
    other = elsewhere(settings, "linked")
    theirs = other.folder.parent / "theirs"
    theirs.mkdir()
    (other.folder.parent / "linked.partial").symlink_to(theirs)
    with pytest.raises(MtkitError, match=r"linked\.partial is a link, and mtkit writes only real files"):
        prepare(other)
    assert not list(theirs.iterdir())


def test_shards_that_another_tokenizer_encoded_are_made_again(settings: DataSettings) -> None:
    small = elsewhere(settings, "small").model_copy(update={"tokenizer": TokenizerSettings(vocabulary=360)})
    (folder, _), (other, _) = (prepare_part(each, Part(1, 1)) for each in (settings, small))
    before = (folder / "shard-1.arrow").read_bytes()
    shutil.copytree(other / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    prepare_part(settings, Part(1, 1))
    assert (folder / "shard-1.arrow").read_bytes() != before
