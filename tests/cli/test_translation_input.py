"""Lines to translate: how many there are, and text on standard input that nobody reads."""

import os
import socket
import sys
from pathlib import Path

import pytest

from mtkit.cli.translation import count_lines, has_unread_input


def test_lines_are_counted_for_a_bar_that_someone_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    for stderr, wanted in [(Terminal(), 2), (object(), None), (None, None)]:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert count_lines(str(path)) == wanted
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert count_lines("-") is None


def test_a_pipe_has_unread_input_only_while_it_holds_text(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert not has_unread_input()  # open but empty: nothing waits for text
        os.write(write, b"text\n")
        assert has_unread_input()
        os.close(write)
        assert has_unread_input()
        assert stdin.read() == "text\n"  # nothing was read
        assert not has_unread_input()


def test_a_file_has_unread_input_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("one\ntwo\n")
    with (tmp_path / "text").open("rb", buffering=0) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert has_unread_input()
        stdin.readline()
        assert has_unread_input()
        assert stdin.readline() == b"two\n"
        assert not has_unread_input()


def test_terminals_and_devices_have_no_unread_input(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    os.write(controller, b"typed\n")
    with os.fdopen(controller, "wb"), os.fdopen(terminal) as stdin, Path(os.devnull).open() as null:
        for other in (stdin, null, None, object()):
            monkeypatch.setattr(sys, "stdin", other)
            assert not has_unread_input()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(sys, "stdin", ours)
        assert not has_unread_input()
        theirs.send(b"text")
        assert has_unread_input()


class Terminal:
    """All that is asked of one."""

    def isatty(self) -> bool:
        return True
