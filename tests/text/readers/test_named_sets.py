"""sacrebleu's test sets by name, from a folder that it has filled."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.plain_text import PlainTextDataset
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings
from mtkit.text.readers.named_sets import read_test_set
from tests.decoding.trained import make_run

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
        ("fake/away", "en-de", "fake/away .en-de. cannot be had: .*No such file"),
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
        ("fake/away", "fake/away .en-de. cannot be had: .*No such file"),
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
