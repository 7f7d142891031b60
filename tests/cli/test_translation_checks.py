"""Options of `mtkit translate` that do not go together, as typed."""

from pathlib import Path

import pytest

from mtkit.cli.translation_checks import check_standard_output
from mtkit.errors import MtkitError
from tests.cli.test_translate import typed
from tests.decoding.trained import make_run


@pytest.mark.parametrize(
    ("idle", "option"),
    [
        (["--scores"], "--scores"),
        (["--beam", "3"], "--beam"),
        (["--n-best", "2"], "--n-best"),
        (["--method", "greedy"], "--method"),
        (["--shortlist", "3"], "--shortlist"),
        (["--alignments", "links"], "--alignments"),
        (["--prefix", "texts"], "--prefix"),
        (["--mbr", "chrf"], "--mbr"),
    ],
)
def test_what_says_nothing_about_given_translations_is_refused(idle: list[str], option: str) -> None:
    with pytest.raises(MtkitError, match=f"{option} is for translations that the run finds; leave it out with"):
        typed("--input", "a", "--target", "b", *idle)


def test_word_scores_are_for_given_translations() -> None:
    with pytest.raises(MtkitError, match="--word-scores scores given translations; give --target FILE too"):
        typed("--input", "a", "--word-scores")


def test_ids_of_documents_say_nothing_of_lines_alone() -> None:
    with pytest.raises(MtkitError, match="--document-ids selects lines to translate together; leave it out with"):
        typed("--input", "a", "--document-ids", "ids", "--sentences")


def test_closed_standard_output_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(MtkitError, match="standard output is closed; give --output FILE"):
        check_standard_output(None, {}, prints=True)
    check_standard_output(None, {}, prints=False)
    check_standard_output(Path("out"), {}, prints=True)


def test_an_output_called_minus_is_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert typed("--input", "test.source", "--output", "-").stdout == typed("--input", "test.source").stdout != ""
    assert sorted(tmp_path.iterdir()) == before
    for options in (["--side", "test", "--output", "-"], ["--input", "test.source", "--alignments", "-"]):
        with pytest.raises(MtkitError, match="- is no name of an output file here"):
            typed(*options)
    with pytest.raises(MtkitError, match="--part needs --input FILE and --output FILE"):
        typed("--input", "test.source", "--output", "-", "--part", "1/2")


def test_given_translations_are_scored_in_batches_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["--input", "test.source", "--target", "test.target"]
    assert typed(*given, "--batch-tokens", "50").stdout == typed(*given).stdout
