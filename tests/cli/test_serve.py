"""`mtkit serve`, as typed, up to where the server begins."""

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app, main
from mtkit.errors import MtkitError
from tests.decoding.trained import make_run

pytest.importorskip("starlette")


@pytest.mark.parametrize(
    ("decoding", "options", "method", "beam"),
    [
        ({"method": "greedy"}, ["--beam", "4"], "beam", 4),
        ({"coverage_penalty": 0.2}, ["--beam", "1"], "greedy", 3),
        ({"method": "greedy"}, [], "greedy", 3),
        ({"method": "sample", "mbr": "chrf", "samples": 4}, ["--beam", "1"], "greedy", 3),
    ],
)
def test_the_beam_that_is_typed_decides_the_search(
    decoding: dict[str, Any],
    options: list[str],
    method: str,
    beam: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(tmp_path).run
    path = run.folder / "recipe.yaml"
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps({**recipe, "decoding": {**recipe["decoding"], **decoding}}))
    served: list[Any] = []
    monkeypatch.setattr("mtkit.serving.server.serve", lambda service, *_, **__: served.append(service))
    result = CliRunner().invoke(
        app, ["serve", "--run", str(run.folder), "--port", "0", *options], catch_exceptions=False
    )
    assert result.exit_code == 0
    settings = served[0]._translator.settings
    assert (settings.method, settings.beam) == (method, beam)


def test_html_is_translated_after_standard_output_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", logged.append)
    monkeypatch.setattr("mtkit.serving.server.serve", lambda service, *_, **__: served.append(service))
    folder = make_run(tmp_path).run.folder
    CliRunner().invoke(app, ["serve", "--run", str(folder), "--port", "0"], catch_exceptions=False)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert served[0].work(served[0].jobs(["<b>a dog</b>"], "en-de", 1, 1000, html=True))
    assert [message.partition(" by ")[0] for message in logged] == ["words are aligned"]


def test_an_address_that_cannot_be_used_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["serve", "--run", str(make_run(tmp_path).run.folder)]
    monkeypatch.setattr("mtkit.decoding.translator.Translator", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, said in (
            (["--port", str(taken.getsockname()[1])], "cannot serve at 127.0.0.1"),
            (["--port", "0", "--allow-host", "*.mt.example"], "is no host name"),
        ):
            with pytest.raises(MtkitError, match=said):
                CliRunner().invoke(app, [*command, *options], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--timeout", "inf"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--wait", "inf"], "--wait"),
        (["--wait", "nan"], "--wait"),
        (["--host", ""], "--host is empty"),
        (["--beam", "0"], "--beam"),
        (["--beam", "-5"], "--beam"),
        (["--host", " "], "--host is empty"),
    ],
)
def test_what_is_no_time_and_no_address_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["mtkit", "serve", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
