import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import DataError
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
