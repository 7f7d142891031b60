"""Lines to translate: how many there are."""

import sys
from pathlib import Path

import pytest

from mtkit.cli.translation import count_lines


def test_lines_are_counted_for_a_bar_that_someone_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    for stderr, wanted in [(Terminal(), 2), (object(), None), (None, None)]:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert count_lines(str(path)) == wanted
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert count_lines("-") is None


class Terminal:
    """All that is asked of one."""

    def isatty(self) -> bool:
        return True
