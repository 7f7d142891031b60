"""Chunks of lines: their sizes, and lines that are answered as they arrive."""

import io
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from mtkit.decoding.lines import chunks
from mtkit.decoding.lines.chunks import live_chunks
from mtkit.decoding.lines.notes import Notes
from mtkit.errors import MtkitError
from mtkit.storage.jobs import Item
from tests.storage.test_jobs import Worker, expected, items, write


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 10)


class Pipe(io.BytesIO):
    """What is written to it, and a word to those who wait for more."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Condition()

    def flush(self) -> None:
        with self.written:
            self.written.notify_all()


def test_who_writes_a_line_at_a_time_is_answered_a_line_at_a_time() -> None:
    pipe = Pipe()

    def partner() -> Iterable[Item]:
        for number, item in enumerate(items(25)):
            with pipe.written:
                assert pipe.written.wait_for(lambda: pipe.getvalue() == expected(items(number)), timeout=20)  # noqa: B023
            yield item

    write([], Worker(), [pipe], chunks=live_chunks(partner()))
    assert pipe.getvalue() == expected(items(25))


def test_who_writes_a_document_at_a_time_is_answered_after_its_blank_line() -> None:
    pipe = Pipe()
    given = [("" if number % 4 == 3 else f"line {number}",) for number in range(22)]

    def partner() -> Iterable[Item]:
        for number, item in enumerate(given):
            if number % 4 == 0:
                with pipe.written:
                    assert pipe.written.wait_for(lambda: pipe.getvalue() == expected(given[:number]), timeout=20)  # noqa: B023
            yield item

    write([], Worker(), [pipe], chunks=live_chunks(partner(), lambda one, other: bool(one[0] and other[0])))
    assert pipe.getvalue() == expected(given)


def test_lines_that_have_come_are_worked_on_together() -> None:
    come, worker = threading.Event(), Worker()

    def reader() -> Iterable[Item]:
        yield from items(25)
        come.set()

    def work(first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
        assert come.wait(20)
        return worker(first, chunk)

    write([], work, [io.BytesIO()], chunks=live_chunks(reader()))
    assert len(worker.firsts) <= 5  # one with what had come at first, two of ten, and what is left


def test_what_came_before_bad_input_is_written() -> None:
    written = io.BytesIO()

    def reader() -> Iterable[Item]:
        yield from items(3)
        raise MtkitError("line 4 is bad")

    with pytest.raises(MtkitError, match="line 4"):
        write([], Worker(), [written], chunks=live_chunks(reader()))
    assert written.getvalue() == expected(items(3))


@pytest.mark.parametrize("longest", [40, 17])
def test_no_chunk_ends_between_items_that_belong_together(
    tmp_path: Path, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(one: Item, other: Item) -> bool:
        return one[1] == other[1]

    monkeypatch.setattr(chunks, "LONGEST_CHUNK", longest)
    borders = (8, 25, 33)
    given = [(str(number), "abcd"[sum(number >= end for end in borders)]) for number in range(38)]
    worker, out = Worker(), tmp_path / "out"
    write(given, worker, [out], together=together)
    assert out.read_bytes() == expected(given)
    # after ten items at the next border of a document, or where a chunk has become too long
    assert worker.firsts == ([0, 25] if longest == 40 else [0, 17, 33])

    for live in (False, True):  # what belongs together has to be waited for
        worker, written = Worker(), io.BytesIO()
        write(given, worker, [written], together=together, chunks=live_chunks(given, together) if live else None)
        assert written.getvalue() == expected(given)
        if live:
            assert set(worker.firsts) <= {0, *borders}
        else:
            assert worker.firsts == ([0, 25] if longest == 40 else [0, 17, 33])


def test_few_lines_are_read_ahead() -> None:
    read = 0

    def reader() -> Iterable[Item]:
        nonlocal read
        for item in items(300):
            read += 1
            yield item

    def work(first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
        assert len(chunk) <= 10
        assert read <= first + len(chunk) + 20 + 1  # the queue, and the line that waits for room in it
        return Worker()(first, chunk)

    written = io.BytesIO()
    write([], work, [written], chunks=live_chunks(reader()))
    assert written.getvalue() == expected(items(300))
