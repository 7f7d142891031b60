"""Where lines of output go."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtkit.decoding.lines.notes import Listed, Notes
from mtkit.decoding.lines.output import write_lines
from mtkit.decoding.lines.stream import Item
from mtkit.storage.files import write_text


def work(first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
    return [[line.upper() for (line,) in chunk]], Notes(cut=Listed.of(range(first + 1, first + 1 + len(chunk))))


def written(output: Any, about: Any = None) -> Notes:
    nobody = list[object]().append
    return write_lines([("a",), ("b",)], work, [output], about, say=nobody, on_skip=nobody)


def test_a_file_a_pipe_and_a_stream_get_the_same(tmp_path: Path) -> None:
    stream = io.BytesIO()
    assert written(stream).cut == written(tmp_path / "out", dict).cut == Listed(2, (1, 2))
    assert stream.getvalue() == (tmp_path / "out").read_bytes() == b"A\nB\n"
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    written(tmp_path / "pipe")
    write_text(tmp_path / "pipe", "C\n")
    assert os.read(reading, 100) == b"A\nB\nC\n"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()


def test_only_for_a_file_is_asked_what_the_output_depends_on(tmp_path: Path) -> None:
    def about() -> Mapping[str, Any]:
        raise NotImplementedError

    written(io.BytesIO(), about)
    with pytest.raises(NotImplementedError):
        written(tmp_path / "out", about)
