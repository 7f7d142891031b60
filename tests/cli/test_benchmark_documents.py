"""`mtkit benchmark documents`, as typed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtkit.benchmark import documents
from mtkit.cli.app import app
from mtkit.errors import MtkitError

SMALL = ["--lengths", "6,9", "--vocabulary", "20", "--beam", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(documents, "LAST", 3)


def test_table_json_and_picture_are_written() -> None:
    pytest.importorskip("matplotlib")
    given = ["--attention", "linear,band", "--attention-option", "window_radius=2", "--output", "there", *SMALL]
    result = CliRunner().invoke(app, ["benchmark", "documents", *given], catch_exceptions=False)
    assert result.exit_code == 0
    assert {each.name for each in Path("there").iterdir()} == {f"documents.{end}" for end in ("txt", "json", "png")}
    assert Path("there/documents.txt").read_text() in result.stdout
    read = json.loads(Path("there/documents.json").read_text())
    assert [(row["attention"], row["length"]) for row in read["rows"]] == [
        (name, length) for length in (6, 9) for name in ("full", "linear", "band")
    ]


def test_a_recipe_with_two_vocabularies_is_measured() -> None:
    Path("two.yaml").write_text("data: {tokenizer: {joint: false}}\n")
    given = ["--attention", "linear", "--recipe", "two.yaml", *SMALL]
    result = CliRunner().invoke(app, ["benchmark", "documents", *given], catch_exceptions=False)
    assert result.exit_code == 0
    assert "linear" in result.stdout
    assert "tie" not in result.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--attention", "etc"], "neither the decoder nor the cross role"),
        (["--lengths", "none"], "--lengths none"),
        (["--dtype", "float99"], "no dtype 'float99'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(given: list[str], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        CliRunner().invoke(app, ["benchmark", "documents", *SMALL, *given], catch_exceptions=False)
    assert not Path("mtkit-benchmark").exists()
