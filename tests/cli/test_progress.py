"""Progress bars where nobody can see them."""

import sys
from itertools import count

import pytest

from mtkit.cli.progress import counted, latest, steps, through


@pytest.mark.parametrize("stderr", [None, object()])
def test_without_a_stderr_the_work_is_done_and_nothing_is_shown(
    stderr: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.time", count(step=3).__next__)  # bars show themselves after two seconds
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(through(range(3), "lines", 3)) == [0, 1, 2]
    with counted(None, "lines", 3) as advance:
        advance(3)
    with steps("benchmark", "part") as on_progress:
        on_progress(1, 2)


def test_a_log_gets_a_line_for_each_title_and_one_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mtkit.cli.progress.monotonic", iter([0, 10, 20, 70, 75, 80, 90]).__next__)
    with latest() as show:
        for line in ("one: a", "one: b", "one: c", "one: d", "two: a"):
            show(line)
    assert capsys.readouterr().err == "one: a\none: d\ntwo: a\n"


def test_titles_that_take_turns_do_not_fill_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mtkit.cli.progress.monotonic", lambda: 0.0)
    with latest() as show:
        for number in range(5):
            show(f"one: {number}")
            show(f"two: {number}")
    assert capsys.readouterr().err == "one: 0\ntwo: 0\n"
