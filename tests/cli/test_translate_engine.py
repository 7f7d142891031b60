"""`mtkit translate --engine`, as typed: the same files, notes and resuming, whichever engine decodes."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.files import translate_file
from mtkit.decoding.lines import chunks
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.runs import find_run
from mtkit.storage.journal import Finished, Journal
from tests.decoding.trained import make_run, sentences

pytestmark = pytest.mark.peer
pytest.importorskip("ctranslate2")

LINES = ["", *sentences(5, 5), "  ", *sentences(3, 6)]


@pytest.fixture(autouse=True)
def _inside(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("work")
    make_run(folder)
    monkeypatch.chdir(folder)
    Path("lines.txt").write_text("".join(f"{line}\n" for line in LINES))


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["translate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "lines.txt"],
        ["--input", "lines.txt", "--scores", "--method", "greedy"],
        ["--input", "lines.txt", "--n-best", "3", "--max-pieces", "6"],
        ["--input", "lines.txt", "--target", "lines.txt"],
    ],
    ids=" ".join,
)
def test_both_write_the_same_and_note_the_same(options: list[str]) -> None:
    own, other = (typed("--engine", engine, *options) for engine in ("mtkit", "ctranslate2"))
    said = [line for line in other.stderr.splitlines() if "ctranslate2" not in line]
    assert said == own.stderr.splitlines()

    def parts(result: Result) -> list[str]:  # a score has rounding in its last digits
        lines = result.stdout.splitlines()
        return [" ".join(p for p in line.split("\t") if not p.lstrip("-").replace(".", "").isdigit()) for line in lines]

    assert len(other.stdout.splitlines()) == len(own.stdout.splitlines()) >= len(LINES)
    assert parts(other) == parts(own)


def test_auto_takes_it_and_says_so_in_one_line() -> None:
    result = typed()
    assert [line for line in result.stderr.splitlines() if "ctranslate2" in line and "--engine mtkit" in line]
    record = json.loads(Path("mtkit-runs/one/translations/test.json").read_text())
    assert record["engine"].startswith("ctranslate2 ")
    assert len(list(Path("mtkit-runs/one/ctranslate2").iterdir())) == 1
    typed("--engine", "mtkit")
    assert json.loads(Path("mtkit-runs/one/translations/test.json").read_text())["engine"] == "mtkit"
    assert "ctranslate2" not in typed("--method", "sample").stderr


def test_what_it_cannot_do_is_refused_in_one_line() -> None:
    with pytest.raises(MtkitError, match=r"not possible: decoding\.method = sample"):
        typed("--engine", "ctranslate2", "--method", "sample")


def test_prefixes_are_for_mtkits_own_search() -> None:
    given = ["--input", "lines.txt", "--output", "out.txt", "--prefix", "lines.txt"]
    assert "ctranslate2" not in typed(*given).stderr
    Path("out.txt").unlink()
    with pytest.raises(MtkitError, match="CTranslate2 does not support prefixes; leave --engine out"):
        typed(*given, "--engine", "ctranslate2")
    translator = Translator([find_run()], engine="ctranslate2")
    with pytest.raises(MtkitError, match="CTranslate2 does not support prefixes"):
        translate_file(translator, LINES, Path("out.txt"), prefixes=LINES)
    assert list(Path().glob("out.txt*")) == []


def test_a_shortlist_is_its_vocabulary_map() -> None:
    own, other = (typed("--engine", engine, "--input", "lines.txt", "--shortlist", "2") for engine in ("mtkit", "auto"))
    assert own.stdout == other.stdout


def test_a_killed_translation_goes_on_with_the_same_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 3)
    typed("--input", "lines.txt", "--output", "whole.txt", "--engine", "ctranslate2")

    add = Journal.add

    def killed(journal: Journal, chunk: Finished) -> None:
        add(journal, chunk)
        raise KeyboardInterrupt

    def interrupted(engine: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", killed)
            CliRunner().invoke(app, ["translate", "--input", "lines.txt", "--output", "out.txt", "--engine", engine])
        assert not Path("out.txt").exists()

    interrupted("ctranslate2")
    assert "resuming after line 3" in typed("--input", "lines.txt", "--output", "out.txt").stderr
    assert Path("out.txt").read_text() == Path("whole.txt").read_text()
    Path("out.txt").unlink()
    interrupted("mtkit")
    assert "with another model or other settings" in typed("--input", "lines.txt", "--output", "out.txt").stderr
