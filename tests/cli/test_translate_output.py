"""Where `mtkit translate` writes."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import MtkitError


def test_an_output_that_cannot_be_written_is_refused_before_the_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it looks for a run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtkit.runs.find_runs", never)
    Path("file").write_text("a\n")
    for options in (["--input", "file", "--output"], ["--side", "test", "--output"], ["--alignments"]):
        for place, wrong in (("file/out", "cannot write file/out: file is a file, not a folder"), (".", "is a folder")):
            with pytest.raises(MtkitError, match=wrong):
                CliRunner().invoke(app, ["translate", *options, place], catch_exceptions=False)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "text", "--output", "text"],
        ["--input", "text", "--output", "link"],
        ["--input", "link", "--output", "text"],
        ["--input", "text", "--output", "out", "--alignments", "text"],
        ["--input", "other", "--target", "text", "--output", "text"],
        ["--input", "other", "--document-ids", "text", "--output", "text"],
        ["--input", "other", "--recipe", "text", "--output", "text"],
        ["--input", "out.partial.jsonl", "--output", "out"],
    ],
)
def test_an_output_never_replaces_text_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text", "other", "out.partial.jsonl"):
        Path(name).write_text("Anna sleeps.\n")
    Path("link").symlink_to("text")
    with pytest.raises(MtkitError, match=r"would replace .*, which is read; give the output another name"):
        CliRunner().invoke(app, ["translate", *options], catch_exceptions=False)
    assert Path("text").read_text() == Path("out.partial.jsonl").read_text() == "Anna sleeps.\n"


def test_standard_output_is_not_appended_to_the_text_that_is_read(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Anna sleeps.\n")
    with text.open("a") as appended:
        command = [sys.executable, "-P", "-m", "mtkit", "translate", "--input", str(text)]
        ended = subprocess.run(command, stdout=appended, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert f"standard output is {text}, the file of --input" in ended.stderr
    assert text.read_text() == "Anna sleeps.\n"


@pytest.mark.parametrize("command", [["report", "run"], ["align", "A."], ["plot", "attention", "--source", "A."]])
def test_other_commands_replace_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    with pytest.raises(MtkitError, match=r"run/run\.json is a file that mtkit keeps in .*run"):
        CliRunner().invoke(app, [*command, "--output", "run/run.json"], catch_exceptions=False)
    assert Path("run/run.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["report", "run"], "report.html"),
        (["align", "A."], "alignment.png"),
        (["plot", "attention", "--source", "A."], "attention.png"),
    ],
)
def test_an_output_that_is_not_named_replaces_no_file_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").write_text("words")
    Path(name).symlink_to("theirs")
    with pytest.raises(MtkitError, match=f"{name} is a link, and mtkit writes only real files"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert Path("theirs").read_text() == "words"
