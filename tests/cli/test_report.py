"""`mtkit report`: which runs it shows, as typed; tests/reporting has what the page says."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.runs import Run
from tests.decoding.trained import make_run


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that the page would show; of the runs one, two and three, two is the latest."""
    names: list[str] = []

    def page(runs: list[Run], *_: object) -> str:
        names.extend(run.folder.name for run in runs)
        return ""

    for name in ("one", "two", "three"):
        make_run(tmp_path, name=name)
    late = tmp_path / "mtkit-runs/two/run.json"
    os.utime(late, (late.stat().st_atime, late.stat().st_mtime + 60))
    monkeypatch.setattr("mtkit.reporting.page.report_page", page)
    monkeypatch.chdir(tmp_path)
    return names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["two"]),
        (["--name", "one"], ["one"]),
        (["three", "mtkit-runs/two", "--name", "one"], ["three", "two", "one"]),
    ],
    ids=["latest", "name", "several"],
)
def test_runs_are_named_as_for_other_commands(reported: list[str], words: list[str], expected: list[str]) -> None:
    assert CliRunner().invoke(app, ["report", *words], catch_exceptions=False).exit_code == 0
    assert reported == expected


@pytest.mark.parametrize("command", [["report"], ["align", "a"], ["plot", "attention", "--source", "a"]])
def test_threads_are_set(command: list[str], reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    CliRunner().invoke(app, [*command, "--threads", "1"])
    assert given == [1]
