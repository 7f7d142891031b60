"""sacrebleu's test sets by name, from a folder that it has filled."""

from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.plain_text import PlainTextDataset
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.data.readers.named_sets import read_test_set
from mtkit.errors import DataError
from tests.decoding.trained import make_run

SOURCES, REFERENCES = (
    ["The old dog.", "A\u2028cat.", "", "\u732b\u3068\u72ac\u3002"],
    ["Hund.", "Eine\x85Katze.", "", "\u732b"],
)


@pytest.fixture(autouse=True)
def _sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fake/one is in the folder; of other sets nothing can be downloaded."""
    for name, url in (("fake/one", []), ("fake/away", [(tmp_path / "none.tgz").as_uri()])):
        made = PlainTextDataset(name, data=url, langpairs={"en-de": ["a", "b"]})
        made._outdir, made._rawdir = str(tmp_path), str(tmp_path / "raw")
        monkeypatch.setitem(DATASETS, name, made)
    for end, lines in (("src", SOURCES), ("ref", REFERENCES)):
        (tmp_path / f"fake_one.en-de.{end}").write_text("".join(f"{each}\n" for each in lines), newline="")


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
