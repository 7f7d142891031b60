"""`mtkit benchmark`, as typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import MtkitError
from tests.cli.test_app import mtkit

SMALL = ["--lengths", "8,16", "--width", "32", "--heads", "4", "--repeats", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtkit.benchmark.attention_work.STEPS", 2)


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["benchmark", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_tables_json_and_picture_are_written() -> None:
    pytest.importorskip("matplotlib")
    shown = typed("attention", "--attention", "band,linear", "--role", "decoder", *SMALL).stdout
    folder = Path("mtkit-benchmark")
    assert {each.name for each in folder.iterdir()} == {f"attention-decoder.{end}" for end in ("txt", "json", "png")}
    assert (folder / "attention-decoder.txt").read_text() in shown
    assert all(str(each) in shown for each in folder.iterdir())
    read = json.loads((folder / "attention-decoder.json").read_text())
    assert {row["attention"] for row in read["measurements"]} == {"full", "band", "linear"}
    assert read["lengths"] == [8, 16]


def test_options_reach_the_mechanisms() -> None:
    state = {}
    for radius in ("1", "8"):
        option = ["--attention-option", f"window_radius={radius}"]
        typed("attention", "--attention", "band", "--role", "decoder", "--output", radius, *option, *SMALL)
        read = json.loads(Path(radius, "attention-decoder.json").read_text())
        state[radius] = [
            row["peak_bytes"] for row in read["measurements"] if (row["attention"], row["work"]) == ("band", "step")
        ]
    assert all(narrow < wide for narrow, wide in zip(state["1"], state["8"], strict=True))


def test_a_failure_is_named_and_the_rest_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Callable[[], None], device: object, clock: object) -> float:
        calls.append(work)
        if len(calls) == 2:
            raise RuntimeError("no kernel")
        return 0.5

    calls: list[Callable[[], None]] = []
    monkeypatch.setattr("mtkit.benchmark.attention.seconds_of", fails)
    result = CliRunner().invoke(app, ["benchmark", "attention", "--attention", "linear", *SMALL])
    assert result.exit_code == 1
    assert "linear, sub-layer, at 8: failed, RuntimeError: no kernel" in result.stdout
    read = json.loads(Path("mtkit-benchmark/attention-encoder.json").read_text())
    assert len(read["failed"]) == 1
    assert len(read["measurements"]) == 2 * 2 * 2 - 1


def test_without_matplotlib_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    shown = typed("attention", "--attention", "full", *SMALL).stdout
    assert "matplotlib is not installed" in shown
    assert not list(Path("mtkit-benchmark").glob("*.png"))


def test_bare_it_says_what_there_is() -> None:
    assert "attention" in typed().stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "bnad"], "did you mean 'band'"),
        (["--attention", "linformer", "--role", "decoder"], "cannot play the role"),
        (["--role", "encodr"], "did you mean 'encoder'"),
        (["--lengths", "8,many"], "--lengths 8,many"),
        *((["--lengths", lengths], "from 1 to") for lengths in ("-4", "8,0", "1e9", "9" * 30, "9" * 5000)),
        (["--device", "gpu9"], "no device 'gpu9'"),
        (["--attention-option", "window"], "KEY=VALUE"),
        (["--attention", "band", "--attention-option", "chunck=3"], "chunck"),
        (["--attention", "full", "--width", "30"], "do not divide"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        typed("attention", *arguments)
    assert "\n" not in str(raised.value)
    assert not Path("mtkit-benchmark").exists()


@pytest.mark.parametrize("arguments", [["atention"], ["attention", "--repeats", "0"], ["attention", "--lenghts", "8"]])
def test_wrong_words_are_one_line_too(arguments: list[str], tmp_path: Path) -> None:
    result = mtkit("benchmark", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "mtkit benchmark" in result.stderr
