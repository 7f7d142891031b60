"""Data prepared with the tokenizer of a run, or of other data."""

import json
import shutil
from pathlib import Path

import pytest

from mtkit.data.borrowed import vocabulary_of, with_tokenizer
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.report import summary
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings
from tests.decoding.trained import make_run

SOURCE = ["Ein Haus \u2028 am See.", "", "犬は木の下にいる。", "The small dog sees a cat. A bird finds one."]
TARGET = ["A house by the lake.", "", "狗在树下。", "<s> ｈａｌｆ"]


def text(folder: Path, name: str = "own", lines: int = 40) -> dict[str, str]:
    """Other text than that of the run, with blank lines, line separators and other scripts."""
    pair = {}
    for side, kinds in (("source", SOURCE), ("target", TARGET)):
        path = folder / f"{name}.{side}"
        path.write_text("".join(f"{kinds[line % 4]}{line if line % 4 != 1 else ''}\n" for line in range(lines)))
        pair[side] = str(path)
    return pair


def settings(place: Path, lender: Path | str, **more: object) -> DataSettings:
    corpora = {side: text(place, side, lines) for side, lines in (("train", 60), ("valid", 8))}
    given = {"folder": place / "data", "tokenizer_from": lender, "cleaning": {"overlap": False}, **corpora, **more}
    return DataSettings.model_validate(given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds mtkit-runs/one and mtkit-data, which it was trained on; and mtkit-runs/two, of two directions."""
    folder = tmp_path_factory.mktemp("lent")
    make_run(folder)
    two = make_run(folder / "other", name="two", directions=("en-de", "en-fr"), vocabulary=448)
    shutil.copytree(two.run.folder, folder / "mtkit-runs" / "two")
    return folder


@pytest.mark.parametrize("lender", ["one", "mtkit-runs/one", "mtkit-data"])
def test_pieces_are_those_of_the_lender(
    lender: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    report = prepare(settings(tmp_path, lender))
    prepared, lent = open_prepared(tmp_path / "data"), open_prepared(place / "mtkit-data")
    assert vocabulary_of(prepared.folder / "tokenizer") == vocabulary_of(lent.folder / "tokenizer")
    assert prepared.settings.tokenizer == lent.settings.tokenizer
    assert len(prepared.valid) == 8
    for row, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        end = "" if row == 1 else str(row)
        for tokens, tokenizer, line in (
            (prepared.valid.source, lent.tokenizers.source, source),
            (prepared.valid.target, lent.tokenizers.target, target),
        ):
            assert tokens[row].tolist() == tokenizer.encode(line + end)
    assert f"vocabulary of {with_tokenizer(prepared.settings).tokenizer_from}: " in summary(report, 1024)


def test_the_second_time_nothing_is_done_and_another_tokenizer_is_other_data(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    prepare(settings(tmp_path, "one"))
    assert prepare(settings(tmp_path, place / "mtkit-data")).unchanged  # the same pieces from elsewhere
    with pytest.raises(DataError, match="the tokenizer: other content"):
        prepare(settings(tmp_path, "two", source_language="en", target_language="de"))
    assert json.loads((tmp_path / "data/prepared.json").read_text())["settings"]["tokenizer_from"] == "mtkit-runs/one"


def test_the_lenders_languages_and_kind_hold(place: Path, tmp_path: Path) -> None:
    lender = settings(tmp_path, place / "mtkit-data", source_language="de", target_language="ja")
    unigram = lender.model_copy(
        update={
            "folder": tmp_path / "lender",
            "tokenizer_from": None,
            "tokenizer": lender.tokenizer.model_copy(
                update={"kind": "unigram", "joint": False, "normalization": "identity", "vocabulary": 320}
            ),
        }
    )
    prepare(unigram)
    prepare(settings(tmp_path, tmp_path / "lender"))
    prepared = open_prepared(tmp_path / "data")
    assert prepared.settings.tokenizer == unigram.tokenizer
    assert not prepared.tokenizers.joint
    assert prepared.directions == ["de-ja"]
    named = settings(tmp_path, tmp_path / "lender", source_language="en", target_language="zh", folder=tmp_path / "zh")
    prepare(named)
    assert open_prepared(tmp_path / "zh").directions == ["en-zh"]


def test_one_direction_of_a_tokenizer_of_several_keeps_its_tag(place: Path, tmp_path: Path) -> None:
    two = place / "mtkit-runs" / "two"
    with pytest.raises(DataError, match=r"translates en-de, en-fr; name the languages of your text"):
        prepare(settings(tmp_path, two))
    prepare(settings(tmp_path, two, source_language="en", target_language="fr"))
    prepared = open_prepared(tmp_path / "data")
    tag = prepared.tokenizers.source.tag("en-fr")
    assert {int(prepared.train.source[row][0]) for row in range(len(prepared.train))} == {tag}
    assert prepared.train.tasks is None
    prepare(settings(tmp_path, two, source_language="en", target_language="it", folder=tmp_path / "it"))
    other = open_prepared(tmp_path / "it")  # a language that it does not know has none
    assert tag not in {int(other.train.source[row][0]) for row in range(len(other.train))}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokenizer": {"vocabulary": 8000}}, r"vocabulary = 8,000 \(--vocabulary\) contradicts .* which has 400;"),
        ({"tokenizer": {"kind": "unigram"}}, r"kind = unigram \(--tokenizer\) contradicts .* which has bpe;"),
        ({"tokenizer": {"joint": False}}, r"joint = false \(--separate\) contradicts .* which has true;"),
        ({"tokenizer": {"byte_fallback": False}}, r"byte_fallback = false contradicts"),
        ({"tokenizer_from": "ome"}, r"--tokenizer-from ome: no run of that name.*did you mean 'one'.*: one, two"),
        ({"tokenizer_from": "mtkit-runs/none"}, r"--tokenizer-from mtkit-runs/none: no run of that name"),
    ],
)
def test_what_contradicts_is_one_line(
    more: dict[str, object], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(DataError, match=message) as caught:
        prepare(settings(tmp_path, "one", **more))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_the_same_setting_is_no_contradiction(place: Path, tmp_path: Path) -> None:
    same = settings(tmp_path, place / "mtkit-runs/one", tokenizer={"vocabulary": 400, "kind": "bpe", "joint": True})
    assert with_tokenizer(same).tokenizer == with_tokenizer(settings(tmp_path, place / "mtkit-runs/one")).tokenizer


def test_data_does_not_replace_what_it_takes_its_tokenizer_from(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "mtkit-data", tmp_path / "data")
    before = (tmp_path / "data/prepared.json").read_bytes()
    with pytest.raises(DataError, match=r"tokenizer lies in .*data, which is to be written; give another folder"):
        prepare(settings(tmp_path, tmp_path / "data"), overwrite=True)
    assert (tmp_path / "data/prepared.json").read_bytes() == before


def test_the_languages_of_a_run_are_those_that_it_was_trained_on(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "mtkit-runs/one", tmp_path / "run")
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "directions": ["nl-sv"]}))  # an import has no text in its recipe
    assert with_tokenizer(settings(tmp_path, run)).directions == ["nl-sv"]
