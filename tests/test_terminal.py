"""Whether there is a terminal, whatever standard error is."""

import io
import sys

import pytest

from mtkit.terminal import watched


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_watched_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stderr in (Terminal(), io.StringIO(), closed, object(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert watched() is isinstance(stderr, Terminal)
