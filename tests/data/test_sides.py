"""Several corpora, directions, test sides and documents, from text to what training reads."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mtkit.data.lengths import lengths_of
from mtkit.data.prepare import prepare
from mtkit.data.prepared import Side, open_prepared
from mtkit.data.report import summary
from mtkit.data.resampling import join_documents
from mtkit.data.sides import Count, total
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings
from mtkit.text.tokenizer import BREAK

ENGLISH = [f"the {number} dogs see a house" for number in range(60)]
GERMAN = [f"die {number} Hunde sehen ein Haus" for number in range(60)]
FRENCH = [f"les {number} chiens voient une maison" for number in range(60)]


def _write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def _corpus(folder: Path, name: str, source: Sequence[str], target: Sequence[str], **more: object) -> dict[str, object]:
    return {"source": _write(folder / f"{name}.1", source), "target": _write(folder / f"{name}.2", target), **more}


@pytest.fixture
def several(tmp_path: Path) -> DataSettings:
    """Two directions; in en-de two corpora, one of them with documents."""
    ids = _write(tmp_path / "ids", [str(number // 7) for number in range(60)])
    dogs, hunde = ["a dog", "it barks", "end"], ["ein Hund", "er bellt", "Ende"]
    return DataSettings.model_validate({
        "folder": tmp_path / "data",
        "train": [
            _corpus(tmp_path, "a", ENGLISH, GERMAN, weight=2, documents=ids),
            _corpus(tmp_path, "b", ENGLISH[:40], FRENCH[:40], direction="en-fr"),
            _corpus(tmp_path, "c", ["a cat", "", "one cat"], ["eine Katze", "nichts", "eine Katze"]),
        ],
        "valid": [
            _corpus(tmp_path, "v", dogs, hunde, documents="empty-lines"),
            _corpus(tmp_path, "w", ["a house"], ["une maison"], direction="en-fr"),
        ],
        "test": {
            "news": _corpus(tmp_path, "n", ["one cat", "x"], ["eine Katze", "y"]),
            "web": _corpus(tmp_path, "x", ["dogs"], ["chiens"], direction="en-fr"),
        },
    })  # fmt: skip


def _rows(side: Side) -> list[tuple[list[int], list[int]]]:
    return [(side.source[row].tolist(), side.target[row].tolist()) for row in range(len(side))]


def test_corpora_directions_and_named_sides_are_told_apart(several: DataSettings) -> None:
    record = prepare(several).record
    opened = open_prepared(several.folder)
    train, tokenizer = opened.train, opened.tokenizers.source
    assert opened.directions == ["en-de", "en-fr"]
    assert train.corpora is not None
    assert train.tasks is not None
    # the empty pair, and the one that is in a test side, are gone
    assert train.corpora.tolist() == [0] * 60 + [1] * 40 + [2]
    assert train.tasks.tolist() == [0] * 60 + [1] * 40 + [0]
    assert train.lines.tolist() == [*range(1, 61), *range(1, 41), 1]
    assert train.documents is None
    for row in (0, 75, 100):
        tag = tokenizer.tag(opened.directions[train.tasks[row]])
        text = [*ENGLISH, *ENGLISH[:40], "a cat"][row]
        assert train.source[row].tolist() == [tag, *tokenizer.encode(text)]
    assert list(opened.tests) == ["news", "web"]
    assert opened.test is opened.tests["news"]
    assert opened.tests["web"].tasks is not None
    assert opened.tests["web"].tasks.tolist() == [1]
    assert opened.tests["news"].corpora is None
    assert list(opened.valid.target_text or ()) == ["ein Hund", "er bellt", "Ende", "une maison"]
    assert opened.valid.documents is not None
    assert opened.valid.documents.tolist() == [0, 0, 0, 1]
    assert [each["segments"] for each in record["sides"]["train"]["corpora"]] == [60, 40, 1]
    assert record["sides"]["train"]["left_out"] == {
        "empty": 1, "overlap": 1, "duplicates": 0, "identical": 0, "length_ratio": 0, "over_long": 0,
    }  # fmt: skip


def test_lengths_are_those_of_each_direction(several: DataSettings, tmp_path: Path) -> None:
    more = [_corpus(tmp_path, "d", ["A dog. A cat. An ox.", "Oh! No."], ["Chien", "Oh"], direction="en-fr")]
    settings = several.model_copy(update={"train": DataSettings.model_validate({
        **several.model_dump(), "train": [*(each.model_dump() for each in several.train), *more]
    }).train})  # fmt: skip
    prepare(settings)
    opened = open_prepared(settings.folder)
    found = lengths_of(opened, 1024)
    assert {name: each.sentences for name, each in found.items()} == {"en-de": {1: 61}, "en-fr": {1: 40, 2: 1, 3: 1}}
    assert {name: sum(each.pairs for each in found[name].bins) for name in found} == {"en-de": 61, "en-fr": 42}
    assert found["en-de"].percentiles[100] == opened.train.source.lengths[:60].max() + 1
    longest = int(opened.train.source.lengths[60:].max())
    assert sum(each.pairs for each in lengths_of(opened, longest)["en-fr"].bins) < 42


def test_the_table_shows_corpora_directions_and_what_was_left_out(several: DataSettings) -> None:
    text = summary(prepare(several), 1_024)
    rows = [line.split() for line in text.splitlines()]
    assert ["words", "source", "words", "target"] in [row[1:5] for row in rows]
    assert ["en-de", "61"] in [row[:2] for row in rows]
    assert ["en-fr", "40"] in [row[:2] for row in rows]
    assert ["corpus", "1,", "weight", "2", "60"] in [row[:5] for row in rows]
    assert any("also in a validation or test side" in line and line.split()[-1] == "1" for line in text.splitlines())


def test_segments_of_a_document_are_joined_for_training_only(several: DataSettings) -> None:
    with_documents = DataSettings.model_validate({**several.model_dump(), "documents": {"pieces": 60}})
    prepare(several.model_copy(update={"folder": several.folder.with_name("single")}))
    prepare(with_documents)
    one, other = open_prepared(several.folder.with_name("single")), open_prepared(several.folder)
    assert _rows(one.valid) == _rows(other.valid)
    assert _rows(one.train) == _rows(other.train)
    whole = join_documents(other.train, 60, seed=1, epoch=0)
    tags = {one.tokenizers.source.tag(each) for each in one.directions}
    pieces, counts = [], []
    for source, target in _rows(whole):
        parts = " ".join(map(str, source)).split(f" {BREAK} ")
        assert {int(part.split()[0]) for part in parts} <= tags  # each segment as it is alone
        assert len(parts) - 1 == source.count(BREAK) == target.count(BREAK)
        assert max(len(source), len(target)) <= 60
        pieces += [piece for piece in source if piece != BREAK]
        counts.append(len(parts))
    assert pieces == [piece for source, _ in _rows(one.train) for piece in source]
    # no row reaches into the next document of 7 segments, and the corpora without documents stay as they are
    assert max(counts) > 1
    assert counts[-41:] == [1] * 41
    for first, count in zip(whole.lines.tolist(), counts[:-41], strict=False):
        assert (first - 1) // 7 == (first + count - 2) // 7


def test_several_processes_write_the_same_files(several: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.chunks._PAIRS", 9)
    monkeypatch.setattr("mtkit.data.encode._ONE_PROCESS", 0)
    other = several.model_copy(update={"folder": several.folder.with_name("other")})
    prepare(several, workers=1)
    prepare(other, workers=2)
    for name in ("train", "valid", "news", "web"):
        assert (several.folder / f"{name}.arrow").read_bytes() == (other.folder / f"{name}.arrow").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"cleaning": {"duplicates": True}},
        {"documents": {"pieces": 50}},
        {"train": ("weight", 3.0)},
        {"train": ("documents", None)},
    ],
)
def test_a_change_of_any_setting_or_of_document_boundaries_is_noticed(
    several: DataSettings, change: dict[str, object]
) -> None:
    prepare(several)
    assert prepare(several).unchanged
    dumped = several.model_dump(mode="json")
    if isinstance(setting := change.get("train"), tuple):
        dumped["train"][0][setting[0]] = setting[1]
        change = {}
    with pytest.raises(DataError, match="prepared with other settings"):
        prepare(DataSettings.model_validate({**dumped, **change}))


def test_duplicates_go_when_asked_and_are_counted_when_not(tmp_path: Path) -> None:
    twice = _corpus(tmp_path, "twice", ENGLISH * 2, GERMAN * 2)
    kept = {"folder": tmp_path / "kept", "train": twice, "valid": twice, "cleaning": {"overlap": False}}
    record = prepare(DataSettings.model_validate(kept)).record
    assert (record["sides"]["train"]["segments"], record["sides"]["train"]["found"]["duplicates"]) == (120, 60)
    asked = kept | {"folder": tmp_path / "asked", "cleaning": {"overlap": False, "duplicates": True}}
    record = prepare(DataSettings.model_validate(asked)).record
    assert (record["sides"]["train"]["segments"], record["sides"]["valid"]["segments"]) == (60, 120)
    assert np.array_equal(open_prepared(tmp_path / "asked").train.lines, np.arange(1, 61))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Eight times the text takes little more memory than the numbers that are kept of each pair."""
    peaks = [_peak(tmp_path, pairs) for pairs in (125_000, 1_000_000)]
    assert peaks[1] < 2**30
    assert peaks[1] - peaks[0] < 150 * 875_000


def _peak(folder: Path, pairs: int) -> int:
    """Bytes that preparing so many pairs takes at its worst, of the parent or the largest worker."""
    work = folder / str(pairs)
    work.mkdir()
    for side, words in (("en", "the dog sees a house number"), ("de", "der Hund sieht ein Haus Nummer")):
        with (work / side).open("w") as file:
            file.writelines(f"{words} {number * 7919 % 1_000_003} {number % 13}\n" for number in range(pairs))
    (work / "run.py").write_text(
        "import resource\n"
        "from pathlib import Path\n"
        "from mtkit.data.prepare import prepare\n"
        "from mtkit.recipe.data import *\n"
        "if __name__ == '__main__':\n"
        "    corpus, cleaning = Corpus(source='en', target='de'), Cleaning(overlap=False)\n"
        "    prepare(DataSettings(folder=Path('data'), train=corpus, valid=corpus, cleaning=cleaning), workers=2)\n"
        "    everyone = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN\n"
        "    print(max(resource.getrusage(who).ru_maxrss for who in everyone))\n"
    )
    done = subprocess.run([sys.executable, "run.py"], cwd=work, capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def test_a_document_may_lie_in_several_chunks(several: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for pairs in (10_000, 4):
        monkeypatch.setattr("mtkit.data.chunks._PAIRS", pairs)
        folder = several.folder.with_name(f"chunks-of-{pairs}")
        prepare(DataSettings.model_validate({**several.model_dump(), "folder": folder, "documents": {"pieces": 60}}))
        documents = open_prepared(folder).train.documents
        assert documents is not None
        found.append(documents.tolist())
    assert found[0] == found[1]


def test_the_longest_segment_of_a_side_is_that_of_any_corpus() -> None:
    counts = [Count(), Count()]
    counts[0].lines, counts[0].longest = 2, {"source": 7, "target": 3}
    counts[1].lines, counts[1].longest = 5, {"source": 4, "target": 9}
    found = total(counts)
    assert (found["lines"], found["longest"]) == (7, {"source": 7, "target": 9})
