"""Output chunk by chunk, resumed after a kill."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock

from mtkit.decoding.lines.chunks import Together, chunks_of
from mtkit.decoding.lines.notes import Listed, Notes
from mtkit.errors import MtkitError
from mtkit.storage.files import write_text
from mtkit.storage.jobs import Chunk, Item, open_job


class KilledError(Exception):
    """What stops the work in these tests."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out.txt"


def items(count: int, changed: int | None = None) -> list[Item]:
    return [(f"line {number}" + "!" * (number == changed), "x\u2028") for number in range(count)]


def expected(given: list[Item]) -> bytes:
    return "".join(f"{number} {item[0]}\u0085\n" for number, item in enumerate(given)).encode()


class Worker:
    """Numbers lines, and fails at the first that is `killed_at`."""

    def __init__(self, killed_at: int | None = None, outputs: int = 1) -> None:
        self.killed_at, self.firsts, self.outputs = killed_at, list[int](), outputs

    def __call__(self, first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
        if self.killed_at is not None and first + len(chunk) > self.killed_at:
            raise KilledError
        self.firsts.append(first)
        lines = [f"{first + number} {item[0]}\u0085" for number, item in enumerate(chunk)]
        return [lines, [f"{len(line)}" for line in lines]][: self.outputs], Notes(cut=Listed.of([first + 1]))


def write(
    given: Iterable[Item],
    worker: Callable[[int, list[Item]], tuple[Sequence[Iterable[str]], Notes]],
    outputs: Sequence[Path | BinaryIO],
    about: object = 1,
    *,
    together: Together | None = None,
    chunks: Iterable[Chunk] | None = None,
    said: list[str] | None = None,
    skipped: list[int] | None = None,
) -> Notes:
    """Write the outputs in chunks of ten items, or in the given ones."""
    say, on_skip = [] if said is None else said, [] if skipped is None else skipped
    with open_job(outputs, {"about": about}, Notes(), say=say.append) as job:
        for chunk in job.todo(chunks or chunks_of(given, together, 10), on_skip.append):
            job.write(chunk, *worker(chunk.first, chunk.items))
    return job.notes


def run(out: Path, given: list[Item], worker: Worker, about: object = 1) -> tuple[list[str], int]:
    """The messages, and the number of items that were skipped."""
    said: list[str] = []
    skipped: list[int] = []
    write(iter(given), worker, [out], about, said=said, skipped=skipped)
    return said, sum(skipped)


def test_notes_go_on_after_a_kill(out: Path) -> None:
    def work(at: int | None) -> Notes:
        return write(items(45), Worker(at), [out])

    with pytest.raises(KilledError):
        work(25)
    assert work(None).cut == Listed(5, (1, 11, 21, 31, 41))
    assert work(None).cut == Listed(5, (1, 11, 21, 31, 41))  # nothing is left of before


def killed(out: Path, given: list[Item], at: int) -> None:
    with pytest.raises(KilledError):
        run(out, given, Worker(at))
    assert not out.exists()


@pytest.mark.parametrize("count", [0, 1, 10, 35])
def test_all_of_it_is_there_in_order(out: Path, count: int) -> None:
    assert run(out, items(count), Worker()) == ([], 0)
    assert out.read_bytes() == expected(items(count))
    assert [each.name for each in out.parent.iterdir()] == ["out.txt"]
    buffer = io.BytesIO()
    write(items(count), Worker(), [buffer])
    assert buffer.getvalue() == out.read_bytes()


def test_the_same_again_goes_on_where_it_was(out: Path) -> None:
    killed(out, items(47), at=25)
    worker = Worker()
    said, skipped = run(out, items(47), worker)
    assert worker.firsts == [20, 30, 40]
    assert skipped == 20
    assert "resuming after line 20" in said[0]
    assert out.read_bytes() == expected(items(47))
    assert len(list(out.parent.iterdir())) == 1


def test_half_a_chunk_behind_the_record_is_written_anew(out: Path) -> None:
    killed(out, items(47), at=25)
    partial = out.with_name("out.txt.partial")
    partial.write_bytes(partial.read_bytes() + b"20 li")
    run(out, items(47), Worker())
    assert out.read_bytes() == expected(items(47))


def test_a_file_shorter_than_its_record_says_is_written_anew_from_there(out: Path) -> None:
    killed(out, items(47), at=35)
    partial = out.with_name("out.txt.partial")
    partial.write_bytes(partial.read_bytes()[:-3])
    worker = Worker()
    run(out, items(47), worker)
    assert worker.firsts == [20, 30, 40]
    assert out.read_bytes() == expected(items(47))


def test_other_text_begins_anew_where_it_differs(out: Path) -> None:
    killed(out, items(47), at=35)
    given, worker = items(47, changed=14), Worker()
    said, skipped = run(out, given, worker)
    assert (worker.firsts, skipped) == ([10, 20, 30, 40], 10)
    assert "other text from line 11 on" in said[0]
    assert out.read_bytes() == expected(given)


def test_shorter_text_leaves_nothing_behind(out: Path) -> None:
    killed(out, items(47), at=45)
    run(out, items(20), Worker())
    assert out.read_bytes() == expected(items(20))


@pytest.mark.parametrize("damage", ["about", "{", "[" * 100_000 + "\n"], ids=["about", "cut", "deep"])
def test_other_settings_and_damaged_records_begin_anew(out: Path, damage: str) -> None:
    killed(out, items(47), at=35)
    if damage != "about":
        record_of(out).write_text(damage)
        out.with_name("out.txt.partial").write_bytes(b"")
    worker = Worker()
    said, skipped = run(out, items(47), worker, about=2 if damage == "about" else 1)
    assert (worker.firsts, skipped) == ([0, 10, 20, 30, 40], 0)
    assert "starts again" in said[0]
    assert ("other settings" in said[0]) == (damage == "about")
    assert out.read_bytes() == expected(items(47))


def test_an_interruption_before_the_first_new_chunk_loses_no_old_one(out: Path) -> None:
    killed(out, items(47), at=35)
    with pytest.raises(KilledError):
        run(out, items(47), Worker(5), about=2)
    with pytest.raises(KilledError):
        run(out, items(47, changed=14), Worker(15))
    assert run(out, items(47), Worker())[1] == 30
    assert out.read_bytes() == expected(items(47))


def record_of(out: Path) -> Path:
    return out.with_name("out.txt.partial.jsonl")


@pytest.mark.parametrize("key", ["sha256", "ends", "notes"])
def test_a_damaged_line_of_the_record_ends_it(out: Path, key: str) -> None:
    killed(out, items(47), at=35)
    lines = [json.loads(line) for line in record_of(out).read_text().splitlines()]
    lines[2][key] = {"sha256": "0", "ends": [1 << 40], "notes": [[1, [1]]]}[key]
    record_of(out).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    worker = Worker()
    run(out, items(47), worker)
    assert worker.firsts == [10, 20, 30, 40]
    assert out.read_bytes() == expected(items(47))


def torn(text: bytes) -> list[int]:
    """Where a file may end after a kill: at each byte near the end of a line, and at every ninth between."""
    near = {
        end + shift for end in (0, *(at for at, byte in enumerate(text, 1) if byte == 10)) for shift in range(-3, 4)
    }
    return [size for size in range(len(text) + 1) if size in near or size % 9 == 0]


def test_a_record_torn_anywhere_goes_on_from_its_last_whole_line(out: Path) -> None:
    killed(out, items(47), at=35)
    whole, partial = record_of(out).read_bytes(), out.with_name("out.txt.partial")
    texts = partial.read_bytes()
    for size in torn(whole):
        record_of(out).write_bytes(whole[:size])
        partial.write_bytes(texts if b"\n" in whole[:size] else b"")  # which is written after the first line
        worker, kept = Worker(), max(whole[:size].count(b"\n") - 1, 0)
        run(out, items(47), worker)
        assert worker.firsts == [0, 10, 20, 30, 40][kept:]
        assert out.read_bytes() == expected(items(47))
        assert [each.name for each in out.parent.iterdir()] == ["out.txt"]
        out.unlink()


def test_an_output_torn_anywhere_goes_on_from_its_last_whole_chunk(out: Path) -> None:
    killed(out, items(47), at=25)
    whole, partial = record_of(out).read_bytes(), out.with_name("out.txt.partial")
    texts = partial.read_bytes()
    for size in torn(texts):
        record_of(out).write_bytes(whole)
        partial.write_bytes(texts[:size])
        worker = Worker()
        run(out, items(47), worker)
        assert worker.firsts[0] == texts[:size].count(b"\n") // 10 * 10
        assert out.read_bytes() == expected(items(47))


def test_killed_again_and_again_it_comes_to_the_end(out: Path) -> None:
    for at in (15, 15, 25, 45):
        killed(out, items(47), at)
        assert len(record_of(out).read_text().splitlines()) == 1 + at // 10
    run(out, items(47), Worker())
    assert out.read_bytes() == expected(items(47))


def test_the_record_grows_by_one_line_a_chunk(out: Path) -> None:
    sizes = list[int]()

    class Watching(Worker):
        def __call__(self, first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
            sizes.append(record_of(out).stat().st_ino)
            return super().__call__(first, chunk)

    run(out, items(47), Watching())
    assert len(set(sizes)) == 1  # one file, never replaced


def test_an_older_output_stays_until_the_new_one_is_whole(out: Path) -> None:
    out.parent.mkdir()
    out.write_text("old\n")
    with pytest.raises(KilledError):
        run(out, items(47), Worker(25))
    assert out.read_text() == "old\n"
    assert json.loads(record_of(out).read_text().splitlines()[0])["about"] == {"about": 1}
    run(out, items(47), Worker())
    assert out.read_bytes() == expected(items(47))


def test_two_at_once_are_kept_apart(out: Path) -> None:
    killed(out, items(47), at=25)
    with FileLock(out.with_name("out.txt.partial.lock")), pytest.raises(MtkitError, match="another process"):
        run(out, items(47), Worker())


def test_input_that_fails_at_once_leaves_nothing(out: Path) -> None:
    killed(out, items(47), at=5)
    assert list(out.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MtkitError, match="cannot write"):
        run(tmp_path / "file" / "out.txt", items(3), Worker())
    with pytest.raises(MtkitError, match="is a folder"):
        run(tmp_path, items(3), Worker())


def test_a_file_a_pipe_and_a_stream_get_the_same(tmp_path: Path) -> None:
    def work(first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
        return [[line.upper() for (line,) in chunk]], Notes(cut=Listed.of(range(first + 1, first + 1 + len(chunk))))

    def written(output: Path | BinaryIO) -> Notes:
        return write([("a",), ("b",)], work, [output])

    stream = io.BytesIO()
    assert written(stream).cut == written(tmp_path / "out").cut == Listed(2, (1, 2))
    assert stream.getvalue() == (tmp_path / "out").read_bytes() == b"A\nB\n"
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    written(tmp_path / "pipe")
    write_text(tmp_path / "pipe", "C\n")
    assert os.read(reading, 100) == b"A\nB\nC\n"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()


def test_the_file_behind_a_stream_is_continued(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        write(items(1), Worker(), [Path(f"/dev/fd/{log.fileno()}")])
    assert (tmp_path / "log").read_bytes() == b"before\n" + expected(items(1))


def test_a_body_that_stops_early_completes_nothing(out: Path) -> None:
    with open_job([out], {"about": 1}, Notes(), say=list[object]().append) as job:
        for chunk in job.todo(chunks_of(items(47), None, 10), list[object]().append):
            job.write(chunk, *Worker()(chunk.first, chunk.items))
            if chunk.first == 20:
                break
    assert not out.exists()
    assert run(out, items(47), Worker())[1] == 30
    assert out.read_bytes() == expected(items(47))


def test_a_job_goes_on_from_files_of_this_form(out: Path) -> None:
    """The names of the files and their content, byte for byte."""
    given, ends, lines = items(25), list[int](), ['{"about": {"about": 1}}']
    for end in (10, 20):
        text = "".join(f"{line}\n{other}\n" for line, other in given[end - 10 : end])
        ends.append(len(expected(given[:end])))
        notes = [[0, []], [end // 10, [1, 11][: end // 10]], *[[0, []]] * 8]
        lines.append(
            json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "ends": ends[-1:], "notes": notes})
        )
    out.parent.mkdir()
    out.with_name("out.txt.partial").write_bytes(expected(given[:20]))
    record_of(out).write_text("".join(f"{line}\n" for line in lines))
    skipped = list[int]()
    assert write(given, Worker(), [out], skipped=skipped).cut == Listed(3, (1, 11, 21))
    assert skipped == [10, 10]
    assert out.read_bytes() == expected(given)


@pytest.mark.parametrize("interrupted", [False, True])
def test_memory_holds_one_chunk(out: Path, interrupted: bool) -> None:
    if interrupted:
        killed(out, items(500), at=250)
    read = 0

    def reading() -> Iterator[Item]:
        nonlocal read
        for item in items(500):
            read += 1
            yield item

    class Watching(Worker):
        def __call__(self, first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
            assert read == first + len(chunk)
            return super().__call__(first, chunk)

    worker = Watching()
    write(reading(), worker, [out])
    assert len(worker.firsts) == (25 if interrupted else 50)
    assert out.read_bytes() == expected(items(500))
