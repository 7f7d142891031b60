"""Work on many lines, chunk by chunk: to a stream as results are made, or to a file, resumed after an interruption."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, BinaryIO

from mtkit.decoding.lines.journal import Finished, Journal, is_journal
from mtkit.decoding.lines.notes import Notes
from mtkit.errors import MtkitError
from mtkit.storage.files import UNFINISHED, finish, inside, locked, packed

CHUNK = 10_000
"""Items worked on together, at most; what is lost by a kill."""

CHARACTERS = 1 << 20
"""Characters in them, about."""

LONGEST_CHUNK = 4 * CHUNK
"""Items in a chunk that is not cut at `CHUNK` because they belong together, at most; of live ones `CHUNK` more."""

Item = tuple[str, ...]
"""An input line with what belongs to it, none of which has a line end; all items of an input have as many strings."""

Work = Callable[[int, list[Item]], tuple[Sequence[Iterable[str]], Notes]]
"""(number of the first item, from 0; items) to the lines of each output, and notes, which depend on nothing else."""

Together = Callable[[Item, Item], bool]
"""Whether an item and the next belong together, so that no chunk should end between them.

An item that would not belong together with another one like it, as a blank line, stands alone."""


def to_stream(
    items: Iterable[Item],
    work: Work,
    streams: Sequence[BinaryIO],
    *,
    together: Together | None = None,
    live: bool = False,
) -> Notes:
    """Writes the outputs of each chunk as soon as they are made; gives the notes on all.

    A chunk of `live` items holds those that arrived during the work on the chunk before. A writer of single lines
    therefore gets an answer to each. Of items that belong `together`, the last that arrived wait for what follows them.
    """
    notes = Notes()
    for first, chunk in _chunks_as_they_come(items, together) if live else _chunks(items, together):
        outputs, found = work(first, chunk)
        notes += found
        for stream, lines in zip(streams, outputs, strict=True):
            stream.write(_bytes(lines))
            stream.flush()
    return notes


def to_file(
    items: Iterable[Item],
    work: Work,
    paths: Sequence[Path],
    about: Mapping[str, Any],
    *,
    together: Together | None = None,
    size: int | None = None,
    say: Callable[[str], object],
    on_skip: Callable[[int], object],
) -> Notes:
    """Writes each output to its path, which appears when it is complete; gives the notes on all, also resumed chunks.

    Until then each output grows chunk by chunk in PATH.partial, with PATH.partial.jsonl beside the first. After an
    interruption, the same call skips finished chunks; `on_skip` gets the number of their items. A chunk is skipped if
    it and all chunks before it held the same items, and if `about`, the JSON values of all else that the output depends
    on, is the same. `size` is that of a chunk; None: `CHUNK`. `say` gets a message when work resumes or starts again.
    An output whose name ends in .gz is a gzip file with a member for each chunk.

    Raises: MtkitError where it cannot be written, or another process is writing it, and for a file named like those
    that mtkit did not write.
    """
    paths = [Path(os.path.realpath(path)) for path in paths]  # a link is kept
    partials, (record_path, *_), locks = (
        [inside(path.parent, f"{path.name}{end}") for path in paths] for end in UNFINISHED
    )
    _check_own(paths, partials, record_path)
    todo, notes = _chunks(items, together, size), Notes()
    try:
        with ExitStack() as stack:
            for path, lock in zip(paths, locks, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                held = f"another process is writing {path}; wait for it, or choose another file"
                stack.enter_context(locked(lock, held))
            files = [stack.enter_context(partial.open("ab")) for partial in partials]
            record = stack.enter_context(Journal(record_path, about))
            sizes = [partial.stat().st_size for partial in partials]
            if problem := record.problem:
                say(f"{partials[0]} {problem}; translation starts again")
            stack.callback(_clear, record, [*partials, record_path])
            end, last, waiting = _skip(record.finished(sizes), todo, partials[0], say, on_skip)
            record.keep(end)
            if last is not None:
                notes = Notes.restored(last.notes)
            for file, end in zip(files, last.ends if last else [0] * len(files), strict=True):
                file.truncate(end)
            for first, chunk in chain(waiting, todo):
                outputs, found = work(first, chunk)
                notes += found
                for file, path, lines in zip(files, paths, outputs, strict=True):
                    file.write(packed(path, _bytes(lines)))
                    file.flush()
                    os.fsync(file.fileno())
                ends = tuple(os.fstat(file.fileno()).st_size for file in files)
                record.add(Finished(_digest(chunk), ends, notes.state()))
            if not any(os.fstat(file.fileno()).st_size for file in files):
                for file, path in zip(files, paths, strict=True):
                    file.write(packed(path, b""))  # a gzip file without a member is damaged
                    file.flush()
            for partial, path in reversed([*zip(partials, paths, strict=True)]):  # the first tells that all are there
                finish(partial, path)
            record.keep(0)
            return notes
    except BrokenPipeError:
        raise  # whoever read what `say` or the work wrote has left
    except OSError as error:
        raise MtkitError(
            f"cannot write {' and '.join(map(str, paths))}: {error.strerror or error}; "
            "free some space or choose another place"
        ) from error


class _Arriving:
    """Items read ahead by a thread, which tells those that have arrived from those still to come."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = items
        self._come: Queue[Item | None] = Queue(2 * CHUNK)
        self._ended = False
        self._error: BaseException | None = None
        Thread(target=self._read, daemon=True).start()

    def take(self, most: int) -> list[Item]:
        """The next item, waited for, and further items that have arrived, up to a total; empty at the end.

        Raises: the error that stopped the reading, after all items read before it have been taken.
        """
        taken: list[Item] = []
        while not self._ended and len(taken) < most and not (taken and self._come.empty()):
            item = self._come.get()
            if item is None:
                self._ended = True
            else:
                taken.append(item)
        if not taken and self._error is not None:
            raise self._error
        return taken

    def _read(self) -> None:
        try:
            for item in self._items:
                self._come.put(item)
        except BaseException as error:  # raised to the reader of the items
            self._error = error
        self._come.put(None)


def _chunks_as_they_come(items: Iterable[Item], together: Together | None) -> Iterator[tuple[int, list[Item]]]:
    """Chunks of the items that have arrived, each with the number of its first item, from 0."""
    arriving, first, held = _Arriving(items), 0, list[Item]()
    while (come := arriving.take(CHUNK)) or held:
        chunk, known = [*held, *come], len(held)
        end = len(chunk)
        if come and together is not None:
            end = _last_seam(chunk, known, together) or (end if end >= LONGEST_CHUNK else 0)
        chunk, held = chunk[:end], chunk[end:]
        if chunk:
            yield first, chunk
            first += len(chunk)


def _last_seam(chunk: list[Item], known: int, together: Together) -> int:
    """Where a chunk can end: behind the last items that belong apart, or as a whole; 0: nowhere yet.

    Its first `known` items belong together.
    """
    if not together(chunk[-1], chunk[-1]):  # it stands alone: whatever follows begins anew
        return len(chunk)
    return next(
        (at for at in range(len(chunk) - 1, max(known, 1) - 1, -1) if not together(chunk[at - 1], chunk[at])), 0
    )


def _chunks(
    items: Iterable[Item], together: Together | None, size: int | None = None
) -> Iterator[tuple[int, list[Item]]]:
    """Chunks of the items, each with the number of its first item, from 0."""
    iterator, first = iter(items), 0
    most = CHUNK if size is None else size
    chunk = _taken(iterator, [], most)
    while chunk:
        following = None
        if together is not None:
            while (following := next(iterator, None)) and together(chunk[-1], following) and len(chunk) < LONGEST_CHUNK:
                chunk.append(following)
        yield first, chunk
        first += len(chunk)
        chunk = _taken(iterator, [] if following is None else [following], most)


def _taken(items: Iterator[Item], begun: list[Item], most: int) -> list[Item]:
    """A chunk of those that it begins with and of further items, until there are the most, or enough characters."""
    chunk, characters = begun, sum(len(each) for item in begun for each in item)
    while len(chunk) < most and characters < CHARACTERS and (item := next(items, None)) is not None:
        chunk.append(item)
        characters += sum(map(len, item))
    return chunk


def _check_own(paths: Sequence[Path], partials: Sequence[Path], record: Path) -> None:
    """Raises: MtkitError for folders, and for unfinished outputs, or a record of them, that mtkit did not write."""
    for path in paths:
        if path.is_dir():
            raise MtkitError(f"{path} is a folder; give the name of a file to write")
    for partial in partials:
        if partial.exists() and not (partial.is_file() and (record.is_file() or not partial.stat().st_size)):
            raise MtkitError(f"{partial} exists, but no {record.name} says that mtkit began it; move it away")
    if record.exists() and not (record.is_file() and (partials[0].exists() or is_journal(record))):
        raise MtkitError(f"{record} is not a record of mtkit; move it away")


def _clear(record: Journal, paths: Iterable[Path]) -> None:
    """Removes these files where there is nothing to resume from."""
    if record.empty:
        for path in paths:
            path.unlink(missing_ok=True)


def _skip(
    done: Iterator[tuple[int, Finished]],
    todo: Iterator[tuple[int, list[Item]]],
    partial: Path,
    say: Callable[[str], object],
    on_skip: Callable[[int], object],
) -> tuple[int, Finished | None, list[tuple[int, list[Item]]]]:
    """Skips the finished chunks; gives where the record of them ends, the last, and the first unfinished, if any."""
    end, last = 0, None
    for first, chunk in todo:
        place, finished = next(done, (0, None))
        if finished is None or finished.sha256 != _digest(chunk):
            if finished is not None:
                say(f"{partial} was made of other text from line {first + 1:,} on")
            if last is not None:
                say(f"resuming after line {first:,}, where {partial} ends")
            return end, last, [(first, chunk)]
        end, last = place, finished
        on_skip(len(chunk))
    return end, last, []


def _digest(chunk: list[Item]) -> str:
    digest = hashlib.sha256()
    for item in chunk:
        digest.update("".join(f"{each}\n" for each in item).encode())
    return digest.hexdigest()


def _bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
