"""`mtkit translate --markup`, as typed."""

import re
from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from tests.cli.test_translate import typed
from tests.decoding.trained import make_run

LINES = ["The <b>old <i>house</i></b>.", "", "<p>A dog &amp; {name}<br/>", "No tags.", "<b></b>"]


def test_tags_are_in_every_line_and_lines_that_are_not_nested_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("\n".join(LINES) + "\n")
    result = typed("--input", "text", "--output", "out", "--markup", "--alignments", "links")
    translated = Path("out").read_text().splitlines()
    assert len(translated) == len(LINES) == len(Path("links").read_text().splitlines())
    for line, other in zip(LINES, translated, strict=True):
        assert sorted(re.findall("<.*?>|{.*?}", other)) == sorted(re.findall("<.*?>|{.*?}", line))
    assert re.search("<b>.*<i>.*</i>.*</b>", translated[0])
    assert (translated[1], translated[4]) == ("", "<b></b>")
    assert "tags that are not nested" in " ".join(result.stderr.split())
    assert "either: line 3" in " ".join(result.stderr.split())
    Path("plain").write_text("The old house.\n\nNo tags.\n")
    typed("--input", "plain", "--output", "plain.out")
    plain = Path("plain.out").read_text().splitlines()
    assert re.sub("<.*?>", "", translated[0]) == plain[0].replace("&", "&amp;").replace("<", "&lt;").replace(
        ">", "&gt;"
    )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--n-best", "2"], "words are aligned with one translation per line"),
        (["--target", "text"], "--markup is for translations that the run finds"),
    ],
)
def test_what_does_not_combine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], error: str
) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a\n")
    with pytest.raises(MtkitError, match=error):
        typed("--input", "text", "--markup", *options)


def test_sides_have_no_tags() -> None:
    with pytest.raises(MtkitError, match="--markup applies to --input only"):
        typed("--markup")
