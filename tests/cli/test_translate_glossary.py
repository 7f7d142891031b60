"""`mtkit translate --glossary`, as typed."""

from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from tests.cli.test_translate import typed
from tests.decoding.trained import make_run

OUTPUT = ("--input", "text", "--output", "out")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The old house.\n\nA dog and a DOG.\nThe tree.\n")
    (tmp_path / "terms").write_text("# animals\ndog\thund\nhouse\n")
    return tmp_path


def test_terms_are_in_the_lines_and_are_counted(folder: Path) -> None:
    result = typed(*OUTPUT, "--glossary", "terms")
    first, second, third, _ = (folder / "out").read_text().splitlines()
    assert "house" in first.lower()
    assert second == ""
    assert third.lower().count("hund") == 2
    assert "3 of 3 glossary terms are in the translations" in result.stderr
    plain = typed("--input", "text", "--output", "plain")
    assert "glossary" not in plain.stderr
    assert (folder / "plain").read_text().splitlines()[3] == (folder / "out").read_text().splitlines()[3]


def test_missed_terms_are_reported_with_their_lines(folder: Path) -> None:
    (folder / "terms").write_text("dog\t" + " ".join(["hund"] * 9))
    result = typed(*OUTPUT, "--glossary", "terms", "--max-pieces", "6")
    message = "0 of 2 glossary terms are in the translations; 2 missing, in line 3"
    assert message in " ".join(result.stderr.split())


def test_a_glossary_whose_terms_do_not_occur_is_noted(folder: Path) -> None:
    (folder / "terms").write_text("dog,hund\n")
    result = typed(*OUTPUT, "--glossary", "terms")
    assert "no term of the glossary is in the text; a line of the file is a source term, a tab" in result.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--method", "greedy"], "needs beam search, and decoding.method = greedy"),
        (["--method", "sample"], "needs beam search, and decoding.method = sample"),
        (["--no-repeat-ngram", "3"], "no_repeat_ngram = 3 may forbid a term of the glossary that occurs twice"),
        (["--shortlist", "5"], "--shortlist leaves out pieces that terms of the glossary need"),
        (["--engine", "ctranslate2"], "CTranslate2 does not support a glossary|ctranslate2 is not possible"),
        (["--target", "text"], "--glossary is for translations that the run finds"),
    ],
)
def test_what_does_not_combine_is_refused(folder: Path, options: list[str], error: str) -> None:
    with pytest.raises(MtkitError, match=error):
        typed(*(OUTPUT[:2] if "--target" in options else OUTPUT), "--glossary", "terms", *options)
    assert not (folder / "out").exists()


def test_documents_are_translated_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, documents=20)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The house.\nThe dog.\n")
    (tmp_path / "terms").write_text("dog\thund\n")
    result = typed(*OUTPUT, "--glossary", "terms")
    assert "with --glossary, lines are translated one by one" in result.stderr
    assert "hund" in (tmp_path / "out").read_text().splitlines()[1].lower()
    with pytest.raises(MtkitError, match="--glossary needs lines that are translated one by one"):
        typed(*OUTPUT, "--glossary", "terms", "--documents")
