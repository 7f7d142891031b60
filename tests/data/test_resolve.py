"""Data prepared with the tokenizer of a run, or of other data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.plain_text import PlainTextDataset
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.report import summary
from mtkit.data.resolve import read_test_set, with_languages, with_tokenizer
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings, TokenizerSettings
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


TEXT = {
    "en": [f"Line {number} is English, with words." for number in range(40)],
    "ko": [f"{number}마리의 개가 나무 아래에서 집을 본다." for number in range(40)],
    "ja": [f"{number}番の犬が木の下で家を見ています。" for number in range(40)],
    "zh": [f"第{number}只老狗在树下看见了一座小房子。" for number in range(40)],
}


def settings_of_text(folder: Path, source: tuple[str, str], target: tuple[str, str], **more: Any) -> DataSettings:
    """Settings of a corpus, for training and validation, of files of these names and languages."""
    for name, language in (source, target):
        (folder / name).write_text("".join(f"{line}\n" for line in TEXT[language]))
    corpus = {"source": folder / source[0], "target": folder / target[0]}
    return DataSettings.model_validate(
        {"folder": folder / "data", "train": corpus, "valid": corpus, "cleaning": {"overlap": False}, **more}
    )


@pytest.mark.parametrize(
    ("source", "target", "more", "direction", "said"),
    [
        (("a.en", "en"), ("a.ja", "ja"), {}, "en-ja", "source en (from the name a.en), target ja (from the name a.ja)"),
        (("a.ja", "ja"), ("a.en", "en"), {}, "ja-en", "source ja (from the name a.ja), target en"),
        (("a.zh-CN.txt", "zh"), ("b.txt", "en"), {}, "zh-CN-de", "target de (by default); name others"),
        (("a.src", "en"), ("a.tgt", "zh"), {}, "en-zh", "target zh (from the script of "),
        (("a.en-ja.src", "en"), ("a.en-ja.tgt", "en"), {}, "en-de", "source en (by default), target de (by default)"),
        (("src.en-ja.txt", "en"), ("tgt.en-ja.txt", "ja"), {}, "en-ja", "source en (from the name src.en-ja.txt), t"),
        (("a.en", "en"), ("a.kr", "ko"), {}, "en-ko", "source en (from the name a.en), target ko (from the script of "),
        (("a.en", "en"), ("a.kr", "en"), {}, "en-kr", "target kr (from the name a.kr)"),
        (("a.src", "ja"), ("a.tgt", "zh"), {}, "ja-zh", "source ja (from the script of "),
        (("a.src", "en"), ("a.tgt", "en"), {}, "en-de", "source en (by default), target de (by default)"),
        (
            ("a.en", "en"),
            ("a.ja", "ja"),
            {"target_language": "japanese"},
            "en-japanese",
            "source en (from the name a.en)",
        ),
        (("a.ja", "ja"), ("a.en", "en"), {"source_language": "x", "target_language": "y"}, "x-y", None),
    ],
)
def test_languages_come_from_names_or_scripts(
    tmp_path: Path,
    source: tuple[str, str],
    target: tuple[str, str],
    more: dict[str, str],
    direction: str,
    said: str | None,
) -> None:
    found, lines = with_languages(settings_of_text(tmp_path, source, target, **more))
    assert found.directions == [direction]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
    assert with_languages(found) == (found, [])


def test_languages_of_validation_text_come_before_the_default(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"{zh}\t{en}\n" for zh, en in zip(TEXT["zh"], TEXT["en"], strict=True)))
    valid = settings_of_text(tmp_path, ("dev.fr", "en"), ("dev.en", "en")).valid
    given = {"train": {"file": tmp_path / "a.tsv", "source": 1, "target": 2}, "valid": valid}
    found, (line, *_) = with_languages(DataSettings.model_validate(given))
    assert found.directions == ["zh-en"]
    assert line.endswith("target en (from the name dev.en)")


def test_text_without_spaces_and_files_the_wrong_way_round_are_warned_of(tmp_path: Path) -> None:
    given = settings_of_text(tmp_path, ("a.en", "en"), ("a.ja", "ja"), target_language="de")
    _, (_, *warnings) = with_languages(given)
    (warning,) = (warning for warning in warnings if "a.ja has no spaces between words" in warning)
    assert warning.endswith("as with --target-language ja")
    chinese = settings_of_text(tmp_path, ("a.en", "en"), ("a.tgt", "zh"), target_language="de")
    assert with_languages(chinese)[1][-1].endswith("as with --target-language zh")
    turned = {"source": tmp_path / "a.ja", "target": tmp_path / "a.en"}
    _, (_, *warnings) = with_languages(
        DataSettings.model_validate(
            {**given.model_dump(exclude={"target_language", "source_language"}), "valid": turned}
        )
    )
    assert [each.startswith("warning: valid has ") for each in warnings] == [True]


def test_names_of_other_languages_than_the_direction_are_warned_of(tmp_path: Path) -> None:
    given = settings_of_text(tmp_path, ("a.en", "en"), ("a.zh", "zh"))
    other = {"source": "b.en", "target": "b.fr"}
    for name, corpora in (("train", [*given.train, other]), ("valid", other), ("test", {"new": other})):
        settings = DataSettings.model_validate({**given.model_dump(exclude_unset=True), name: corpora})
        _, (_, *warnings) = with_languages(settings)
        (warning,) = warnings
        assert warning.startswith(f"warning: {'new' if name == 'test' else name} has b.en as source and b.fr as target")
        assert warning.endswith("give the corpus `direction: en-fr`" if name == "train" else "leave the side out")
    silent = [
        {**other, "direction": "en-fr"},
        {"source": "b.eng_Latn", "target": "b.zho_Hant"},
        {**other, "target": "b"},
    ]
    settings = DataSettings.model_validate({**given.model_dump(exclude_unset=True), "train": [*given.train, *silent]})
    assert len(with_languages(settings)[1]) == 1
    one_side = {"source": "b.fr", "translated_by": "run"}
    settings = DataSettings.model_validate({**given.model_dump(exclude_unset=True), "train": [*given.train, one_side]})
    assert "train has b.fr as source, but the direction is en to zh" in with_languages(settings)[1][1]
    french = DataSettings.model_validate({"train": other, "valid": other, "target_language": "French"})
    assert len(with_languages(french)[1]) == 1


def test_endings_that_name_no_language_are_not_warned_of(tmp_path: Path) -> None:
    """Parts of a split file end in aa, ab and so on, and countries have other codes than languages."""
    parts = [{"source": f"train.en.{part}", "target": f"train.de.{part}"} for part in ("aa", "ab", "am")]
    swedish = {"source": "a.en", "target": "a.se"}
    for train, target in ((parts, "de"), ([swedish], "sv")):
        given = {"train": train, "valid": train[-1], "source_language": "en", "target_language": target}
        assert with_languages(DataSettings.model_validate(given))[1] == []


def test_text_with_directions_and_columns_of_tables_need_no_guess(tmp_path: Path) -> None:
    table = {"file": tmp_path / "a.tsv", "source": "text.en", "target": "text.zh"}
    (tmp_path / "a.tsv").write_text(
        "text.en\ttext.zh\n" + "".join(f"{a}\t{b}\n" for a, b in zip(TEXT["en"], TEXT["zh"], strict=True))
    )
    found, lines = with_languages(DataSettings.model_validate({"train": table, "valid": table}))
    assert found.directions == ["en-zh"]
    assert len(lines) == 1
    for corpus in ({**table, "direction": "en-zh"}, None):
        given = DataSettings.model_validate({"train": corpus, "valid": corpus} if corpus else {})
        assert with_languages(given) == (given, [])


def test_prepared_data_has_the_languages_and_says_so_once_more(tmp_path: Path) -> None:
    given = settings_of_text(tmp_path, ("a.en", "en"), ("a.ja", "ja"), tokenizer={"vocabulary": 400})
    for unchanged in (False, True):
        report = prepare(given)
        assert report.unchanged == unchanged
        assert summary(report, 100).splitlines()[1].startswith("languages: source en (from the name a.en), target ja ")
        assert report.record["settings"]["target_language"] == "ja"


SOURCES, REFERENCES = (
    ["The old dog.", "A\u2028cat.", "", "\u732b\u3068\u72ac\u3002"],
    ["Hund.", "Eine\x85Katze.", "", "\u732b"],
)


@pytest.fixture(autouse=True)
def _sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fake/one is in the folder; of other sets nothing can be downloaded."""
    away = [(tmp_path / "none.tgz").as_uri()]
    for name, url, pair, files in (
        ("fake/one", [], "en-de", ["a", "b"]),
        ("fake/away", away, "en-de", ["a", "b"]),
        ("fake/french", [], "en-fr", ["a", "b"]),
        ("fake/many", [], "en-de", ["a", "b"]),
    ):
        made = PlainTextDataset(name, data=url, langpairs={pair: files})
        made._outdir, made._rawdir = str(tmp_path), str(tmp_path / "raw")
        if name == "fake/many":
            monkeypatch.setattr(made, "fieldnames", lambda langpair: ["src", "ref:A", "ref:B"])
        monkeypatch.setitem(DATASETS, name, made)
    for end, lines in (("src", SOURCES), ("ref", REFERENCES), ("ref-A", REFERENCES), ("ref-B", REFERENCES)):
        for name in ("one", "many"):
            (tmp_path / f"fake_{name}.en-de.{end}").write_text("".join(f"{each}\n" for each in lines), newline="")


def test_a_set_is_read() -> None:
    found = read_test_set("fake/one", "en-de")
    assert (found.name, found.sources, found.references) == ("fake-one.en-de", SOURCES, REFERENCES)


@pytest.mark.parametrize(
    ("name", "languages", "said"),
    [
        ("wtm14", "en-de", "no test set 'wtm14' .did you mean 'wmt14'"),
        ("fake/one", "en-fr", "no language pair en-fr.*--languages: en-de"),
        ("fake/away", "en-de", "fake/away .en-de. is not available: .*No such file"),
    ],
)
def test_what_cannot_be_had(name: str, languages: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_test_set(name, languages)


def held_out(folder: Path, name: str, direction: str | None = None) -> DataSettings:
    for side in ("en", "de"):
        (folder / f"a.{side}").write_text("".join(f"{side} {number} dogs by the sea\n" for number in range(60)))
    pair = {"source": str(folder / "a.en"), "target": str(folder / "a.de")}
    test = {"one": {"sacrebleu": name, **({"direction": direction} if direction else {})}}
    given = {"folder": folder / "data", "train": pair, "valid": {"sacrebleu": "fake/one"}, "test": test}
    return DataSettings.model_validate({**given, "tokenizer": {"vocabulary": 304}})


def test_it_is_a_held_out_side_of_prepared_data(tmp_path: Path) -> None:
    prepare(held_out(tmp_path, "fake/one"))
    prepared = open_prepared(tmp_path / "data")
    for side in (prepared.valid, prepared.tests["one"]):
        assert list(side.source_text or ()) == SOURCES
        assert list(side.target_text or ()) == REFERENCES
    assert prepare(held_out(tmp_path, "fake/one")).unchanged


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wtm14", "no test set 'wtm14' .did you mean 'wmt14'"),
        ("fake/away", "fake/away .en-de. is not available: .*No such file"),
        ("fake/french", "no language pair en-de.*; give the corpus one of these as its `direction`: en-fr"),
        ("fake/many", "fake/many .en-de. has 2 references; give one of them as text files: source: .*src, target: "),
    ],
)
def test_what_cannot_be_a_side(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        prepare(held_out(tmp_path, name))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ({"train": {"sacrebleu": "wmt14"}, "valid": {"sacrebleu": "wmt13"}}, "applies to validation and test sides"),
        ({"valid": {"sacrebleu": "wmt13", "file": "a.tsv"}}, "already provides the corpus's text; leave file out"),
    ],
)
def test_what_does_not_go_with_it(corpus: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DataSettings.model_validate({"train": {"source": "a", "target": "b"}, **corpus})


def test_a_run_translates_it_and_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = ["--test", "fake/one", "--languages", "en-de", "--method", "greedy", "--engine", "mtkit"]
    assert CliRunner().invoke(app, ["translate", *options], catch_exceptions=False).exit_code == 0
    there = tmp_path / "mtkit-runs" / "one" / "translations"
    assert (there / "fake-one.en-de.txt").read_text().count("\n") == len(SOURCES)
    shown = CliRunner().invoke(app, ["score", "--metric", "chrF"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "chrF" in shown.stdout


def test_words_of_languages_without_spaces_are_warned_of(tmp_path: Path) -> None:
    settings = settings_of_text(tmp_path, ("a.en", "en"), ("a.ja", "ja"))
    words = settings.model_copy(update={"tokenizer": TokenizerSettings(kind="words")})
    assert any("ja has no spaces between words" in line for line in with_languages(words)[1])
    assert not any("spaces" in line for line in with_languages(settings)[1])
