"""Where `mtkit translate` writes."""

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
        for place, wrong in (("file/out", "cannot write file/out: Not a directory"), (".", "is a folder")):
            with pytest.raises(MtkitError, match=wrong):
                CliRunner().invoke(app, ["translate", *options, place], catch_exceptions=False)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
