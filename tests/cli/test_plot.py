import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import DataError, MtkitError
from tests.decoding.trained import Trained, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    pytest.importorskip("matplotlib")
    return make_run(tmp_path_factory.mktemp("runs"), attention="adaptive-span")


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plot", *arguments])


def test_learned_prints_a_table_and_draws_a_picture(trained: Trained, tmp_path: Path) -> None:
    picture = tmp_path / "heads.png"
    result = call("learned", "--run", str(trained.run.folder), "--output", str(picture))
    assert result.exit_code == 0, result.output
    head, *rows, blank, last = result.output.splitlines()
    assert head.split() == ["role", "layer", "mechanism", "head", "cost", "entropy", "distance", "span"]
    assert [row.split()[:4] for row in rows[:2]] == [["encoder", "1", "adaptive-span", head] for head in "12"]
    assert (blank, last) == ("", str(picture))
    assert picture.exists()


def test_learned_gives_the_same_numbers_as_json(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("learned", "--run", str(trained.run.folder), "--segments", "3", "--json")
    assert result.exit_code == 0, result.output
    written = json.loads(result.output)
    assert written["segments"] == 3
    assert written["checkpoint"] == "update-00000010"
    assert len(written["layers"][0]["cost"]) == len(written["layers"][0]["learned"]["span"]) == 2
    assert not list(tmp_path.iterdir())
    again = json.loads(call("learned", "--run", str(trained.run.folder), "--segments", "3", "--json").output)
    assert again == written


def test_without_segments_no_data_is_needed(trained: Trained, tmp_path: Path) -> None:
    arguments = ("learned", "--run", str(trained.run.folder), "--data", str(tmp_path / "gone"), "--json")
    written = json.loads(call(*arguments, "--segments", "0").output)
    assert written["loss"] is None
    assert written["layers"][0]["cost"] is None
    assert written["layers"][0]["learned"]["span"] is not None
    assert isinstance(call(*arguments).exception, DataError)


def test_output_prints_a_row_and_draws_a_column_for_each_piece(trained: Trained, tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    arguments = ("output", "--run", str(trained.run.folder), "--source", "The dog.", "--target", "The cat.")
    result = call(*arguments, "--top", "2", "--output", str(picture))
    assert result.exit_code == 0, result.output
    head, *rows, blank, last = result.output.splitlines()
    assert head.split() == ["piece", "probability", "rank", "entropy", "likeliest", "pieces"]
    assert rows[-1].startswith("</s>")
    assert (blank, last) == ("", str(picture))
    assert picture.exists()
    steps = json.loads(call(*arguments, "--top", "2", "--json").output)
    assert [step["piece"] for step in steps] == [row.split()[0] for row in rows]
    assert {len(step["top"]) for step in steps} == {2}


def test_output_of_a_long_target_is_cut(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.decoding.alignment.SHOWN", 3)
    arguments = ("--source", "The dog.", "--target", "The cat and the bird.", "--output", str(tmp_path / "a.png"))
    result = call("output", "--run", str(trained.run.folder), *arguments)
    assert "note: only the first 3 of" in result.stderr
    assert len(result.stdout.splitlines()) == 1 + 3 + 2


def test_positions_of_a_run_and_of_a_preset(trained: Trained, tmp_path: Path) -> None:
    for number, model in enumerate((("--run", str(trained.run.folder)), ("--preset", "tiny"))):
        picture = tmp_path / f"{number}.png"
        result = call("positions", *model, "--positions", "12", "--dimension", "3", "--output", str(picture))
        assert result.exit_code == 0, result.output
        assert result.output.splitlines() == ["sinusoidal positions: source and target", "", str(picture)]
        assert picture.exists()
    for other in (("--run", str(trained.run.folder)), ("--checkpoint", "last")):
        result = call("positions", *other, "--preset", "tiny")
        assert isinstance(result.exception, MtkitError)


def test_too_many_positions_are_refused() -> None:
    result = call("positions", "--preset", "tiny", "--positions", "1000000000000")
    assert result.exit_code == 2
    assert "less than or equal to 100000" in result.output


def test_positions_of_a_recipe_with_two_vocabularies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("data: {tokenizer: {joint: false}}\n")
    result = call("positions", "--recipe", "two.yaml")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("what", [("learned",), ("output", "--source", "The dog.")])
def test_json_draws_no_picture(trained: Trained, what: tuple[str, ...]) -> None:
    result = call(*what, "--run", str(trained.run.folder), "--json", "--output", "a.png")
    assert "--output is for the picture" in str(result.exception)
