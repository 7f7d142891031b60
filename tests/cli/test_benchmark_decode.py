"""`mtkit benchmark decode`, as typed."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit import product_rate
from mtkit.benchmark import decoding
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
    monkeypatch.setattr(product_rate, "LARGE", {"cpu": 32})
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


def test_runs_by_name_and_folder_are_measured_side_by_side(trained: Trained) -> None:
    here = trained.run.folder.parent.parent
    make_run(here / "sub", name="two", attention="linear")
    runs = ["--run", "sub/mtkit-runs/two", "--run", "mtkit-runs/one", "--name", "one"]  # the second of them twice
    shown = typed(*runs, "--beam", "1", "--segments", "4", "--dtype", "float32,int8", "--output", "both").stdout
    rows = json.loads(Path("both/decode.json").read_text())["rows"]
    expected = [(run, arithmetic) for run in ("two", "one") for arithmetic in ("float32", "int8")]
    assert [(row["run"], row["arithmetic"]) for row in rows] == expected
    assert "one: mtkit int8" in shown
    assert "two: mtkit int8" in shown


@pytest.mark.peer
def test_of_several_runs_one_that_a_program_cannot_hold_is_left_out_with_a_note(trained: Trained) -> None:
    pytest.importorskip("transformers")
    make_run(trained.run.folder.parent.parent / "sub2", name="three", attention="linear")
    given = ["--beam", "1", "--segments", "4", "--beside", "huggingface", "--output", "peer"]
    several = typed("--run", "sub2/mtkit-runs/three", "--run", "mtkit-runs/one", *given)
    assert "note: sub2/mtkit-runs/three is measured without huggingface: " in several.stderr
    rows = json.loads(Path("peer/decode.json").read_text())["rows"]
    assert [(row["run"], row["program"]) for row in rows] == [
        ("three", "mtkit"),
        ("one", "mtkit"),
        ("one", "huggingface"),
    ]
    with pytest.raises(MtkitError, match="full attention"):
        typed("--run", "sub2/mtkit-runs/three", *given)


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
