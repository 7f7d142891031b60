"""Where the lines to translate come from: a file, or standard input."""

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mtkit.errors import MtkitError
from mtkit.terminal import watched


def text(name: str) -> Path | Iterable[str]:
    """The file of that name; of -, the lines of standard input."""
    from mtkit.data.readers import decoded, lines_of

    return decoded(lines_of(_standard_input()), "standard input") if name == "-" else Path(name)


def count(name: str) -> int | None:
    """How many lines there are, where a bar will show it and it can be known."""
    from mtkit.data.readers import Lines

    known = name != "-" and Path(name).is_file() and watched()  # a pipe can be read but once
    return sum(1 for _ in Lines(Path(name))) if known else None


def is_live(name: str) -> bool:
    """Whether somebody may be waiting for an answer to what is read: it comes through a pipe or from a terminal."""
    try:
        return name == "-" and sys.stdin is not None and not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except OSError:
        return False


def _standard_input() -> BinaryIO:
    """Standard input, opened anew: a thread may wait for it, and Python cannot end while one holds `sys.stdin`."""
    if sys.stdin is None:
        raise MtkitError("standard input is closed; give --input a file, or text to standard input")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # it is no file, as in a program that stands in for one
        return sys.stdin.buffer
