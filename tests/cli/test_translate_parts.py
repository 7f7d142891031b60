"""`mtkit translate --part` and `--join`, as typed."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import DataError, MtkitError
from tests.decoding.trained import make_run, sentences


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["translate", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--input", "test.source", "--output", "o", "--part", "3/2"], MtkitError, "--part 2/8"),
        (["--input", "test.source", "--output", "o", "--part", "1/2", "--join"], MtkitError, "leave one out"),
        (["--input", "-", "--output", "o", "--part", "1/2"], MtkitError, "needs --input FILE"),
        (["--input", "test.source", "--join"], MtkitError, "--output FILE"),
        (["--part", "1/2"], MtkitError, "needs --input FILE"),
        (["--input", "test.source", "--output", "o", "--join"], DataError, "no parts of o"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[MtkitError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)


def test_parts_joined_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out, links = tmp_path / "text", tmp_path / "the out", tmp_path / "links"
    text.write_text("".join(f"{line}\n" for line in [*sentences(5, 3), "", "犬\u2028 sees 木", *sentences(4, 4)]))
    given = ["--input", str(text), "--output", str(out), "--alignments", str(links)]
    assert typed(*given).exit_code == 0
    whole = out.read_bytes(), links.read_bytes()
    out.unlink()
    links.unlink()
    assert typed(*given, "--part", "2/3").exit_code == 0
    with pytest.raises(DataError, match="2 are missing or not finished: 1, 3; translate with --part 1/3"):
        typed(*given, "--join")
    monkeypatch.setenv("WORLD_SIZE", "3")  # as torchrun sets it
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        result = typed(*given)
        assert ("part 2/3 is finished" in result.stderr) == (rank == 1)
    with pytest.raises(MtkitError, match="leave --part out"):
        typed(*given, "--part", "1/3")
    with pytest.raises(MtkitError, match="leave --prefix out"):
        typed(*given, "--prefix", str(text))
    with pytest.raises(MtkitError, match="torchrun translates parts of a file"):
        typed("--side", "test")
    monkeypatch.delenv("WORLD_SIZE")
    assert not out.exists()
    result = typed(*given, "--join")
    assert f"11 lines of 3 parts: {out} and {links}" in result.stdout
    assert f"rm '{out}'.part-*" in result.stderr
    assert (out.read_bytes(), links.read_bytes()) == whole
