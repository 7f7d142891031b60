"""`mtkit benchmark decode`, as typed."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.benchmark import decoding, machine
from mtkit.cli.app import app
from mtkit.decoding import lexicon
from mtkit.errors import MtkitError
from tests.decoding.trained import Trained, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run") / "here")


@pytest.fixture(autouse=True)
def _inside(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.run.folder.parent.parent)
    monkeypatch.setattr(machine, "LARGE", {"cpu": 32})
    monkeypatch.setattr(decoding, "REST", 0.0)


def typed(*arguments: str) -> Result:
    given = ["benchmark", "decode", "--repeats", "1", "--threads", "1", *arguments]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_table_json_and_picture_are_written() -> None:
    pytest.importorskip("matplotlib")
    given = ["--name", "one", "--beam", "1,3", "--segments", "4", "--batch-tokens", "64,256", "--output", "there"]
    shown = typed(*given).stdout
    assert {each.name for each in Path("there").iterdir()} == {"decode.txt", "decode.json", "decode.png"}
    assert Path("there/decode.txt").read_text() in shown
    read = json.loads(Path("there/decode.json").read_text())
    assert [(row["beam"], row["lines"], len(row["texts"])) for row in read["rows"]] == [(1, 4, 4), (3, 4, 4)]
    assert {row["size"] for row in read["rows"]} <= {64, 256}


def test_a_shortlist_is_measured_beside_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicon, "FREQUENT", 5)
    given = ["--name", "one", "--beam", "1", "--segments", "4", "--dtype", "float32,int8", "--shortlist", "1"]
    shown = typed(*given, "--output", "short").stdout
    rows = json.loads(Path("short/decode.json").read_text())["rows"]
    assert [(row["arithmetic"], row["shortlist"]) for row in rows] == [
        ("float32", 0),
        ("float32", 1),
        ("int8", 0),
        ("int8", 1),
    ]
    assert [row["ceiling"] is None for row in rows] == [False, True, False, True]
    assert "mtkit int8 short" in shown
    assert all(rows[place]["texts"] != rows[place + 1]["texts"] for place in (0, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beam", "1,few"], "--beam 1,few"),
        (["--beam", "0"], "from 1"),
        (["--beam", "1001"], "from 1 to 1,000"),
        (["--dtype", "flaot32"], "flaot32"),
        (["--name", "two"], "no run 'two'"),
        (["--side", "valdi"], "no test side 'valdi'"),
        (["--beside", "ctranslate3"], "did you mean 'ctranslate2'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)
