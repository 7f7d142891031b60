"""Resumable jobs: outputs that grow chunk by chunk and survive a kill, and parts of a job for several machines.

OUTPUT.partial           the finished chunks of an output; it is renamed to OUTPUT when the job is complete
OUTPUT.partial.jsonl     the journal of the job, in the folder of the first output
OUTPUT.partial.lock      held by the process that works on the job
OUTPUT.part-2-of-8       the output of part 2 of 8
OUTPUT.part-2-of-8.json  what that part is made of

`open_job` serves the translation and scoring of files and the translation of held-out sides. Its outputs only grow, so
a changed chunk invalidates all later ones. The shards of `mtkit.data.shards` use the parts only: a shard of a million
pairs is too large to hold, is a file of its own, and stays valid if an earlier one changes.
"""

import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, Self, TypeVar, cast

from pydantic_core import from_json

from mtkit.errors import DataError, MtkitError, cut
from mtkit.storage.files import (
    WriteError,
    finish,
    inside,
    is_device,
    json_text,
    locked,
    open_device,
    packed,
    write_json,
    writing,
)
from mtkit.storage.journal import Finished, Journal, is_journal
from mtkit.storage.records import record_bytes
from mtkit.terminal import Say

UNFINISHED = (".partial", ".partial.jsonl", ".partial.lock")
"""Suffixes of an unfinished output's files: its text, its journal and its lock."""

LISTED = 10
"""Missing parts that an error lists at most."""

Item = tuple[str, ...]
"""An input line with what belongs to it, without line ends; all items of a job have the same number of strings."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring items that are worked on together."""

    first: int
    """The number of the first item, from 0."""
    items: list[Item]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the items, in hexadecimal digits."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update("".join(f"{text}\n" for text in item).encode())
        return digest.hexdigest()


class Notes(Protocol):
    """Notes on the items of a job, added up over its chunks and kept in the journal."""

    def __add__(self, other: Self, /) -> Self: ...

    def state(self) -> list[Any]:
        """The notes as JSON values."""

    @classmethod
    def restored(cls, state: Any) -> Self:
        """The notes with this `state`. Raises: TypeError or ValueError for an invalid state."""


N = TypeVar("N", bound=Notes)


class Job(Generic[N]):
    """A job that writes to streams, chunk by chunk, and cannot resume; see `open_job`."""

    resumes = False
    """Whether finished chunks are skipped after an interruption: chunks must then be the same in every call."""

    def __init__(self, streams: Sequence[BinaryIO], notes: N) -> None:
        self.streams = streams
        self.notes = notes
        """The notes on all chunks so far, resumed ones included."""

    def todo(self, chunks: Iterable[Chunk], on_skip: Callable[[int], object]) -> Iterator[Chunk]:
        """The chunks that are not finished, in order; `on_skip` gets the number of items in each finished one."""
        del on_skip
        yield from chunks

    def write(self, chunk: Chunk, outputs: Sequence[Iterable[str]], notes: N) -> None:
        """Write the lines of each output for the next chunk of `todo`, and add the notes on it."""
        del chunk
        self.notes += notes
        for stream, lines in zip(self.streams, outputs, strict=True):
            stream.write(_bytes(lines))
            stream.flush()


class _FileJob(Job[N]):
    """A job that writes to unfinished files, with a journal of the finished chunks."""

    resumes = True

    def __init__(self, paths: Sequence[Path], files: Sequence[BinaryIO], journal: Journal, notes: N, say: Say) -> None:
        super().__init__(files, notes)
        self._paths, self._journal, self._say = paths, journal, say
        self._valid: tuple[int, Sequence[int]] | None = None
        """Sizes of the journal and of the outputs up to the last valid chunk; None once nothing follows it."""
        self.complete = False

    def todo(self, chunks: Iterable[Chunk], on_skip: Callable[[int], object]) -> Iterator[Chunk]:
        chunks, partial = iter(chunks), self.streams[0].name
        end, last, unfinished = 0, None, list[Chunk]()
        finished = self._journal.finished(self._sizes(), type(self.notes).restored)
        for chunk in chunks:
            place, done = next(finished, (0, None))
            if done is None or done.sha256 != chunk.fingerprint:
                if done is not None:
                    self._say(f"{partial} was made of other text from line {chunk.first + 1:,} on")
                if last is not None:
                    self._say(f"resuming after line {chunk.first:,}, where {partial} ends")
                unfinished.append(chunk)
                break
            end, last = place, done
            on_skip(len(chunk.items))
        self._valid = end, last.ends if last else [0] * len(self.streams)
        if last is not None:
            self.notes = type(self.notes).restored(last.notes)
        yield from unfinished
        yield from chunks
        self.complete = True

    def write(self, chunk: Chunk, outputs: Sequence[Iterable[str]], notes: N) -> None:
        self._drop_invalid()
        self.notes += notes
        for file, path, lines in zip(self.streams, self._paths, outputs, strict=True):
            file.write(packed(path, _bytes(lines)))
            file.flush()
            os.fsync(file.fileno())
        self._journal.add(Finished(chunk.fingerprint, self._sizes(), self.notes.state()))

    def finish(self) -> None:
        """Rename the unfinished files; the first one last, as it shows that all are complete."""
        self._drop_invalid()
        if not any(self._sizes()):
            for file, path in zip(self.streams, self._paths, strict=True):
                file.write(packed(path, b""))  # a gzip file without a member is damaged
                file.flush()
        for file, path in reversed([*zip(self.streams, self._paths, strict=True)]):
            finish(Path(file.name), path)
        self._journal.keep(0)

    def _drop_invalid(self) -> None:
        """Drop what follows the last valid chunk; an interruption before the next one is complete leaves it."""
        if self._valid is not None:
            end, sizes = self._valid
            for file, size in zip(self.streams, sizes, strict=True):
                file.truncate(size)
            self._journal.keep(end)
            self._valid = None

    def _sizes(self) -> tuple[int, ...]:
        return tuple(os.fstat(file.fileno()).st_size for file in self.streams)


@contextmanager
def open_job(outputs: Sequence[Path | BinaryIO], about: Mapping[str, Any], notes: N, *, say: Say) -> Iterator[Job[N]]:
    """Open a job that writes lines to `outputs`; its body writes each chunk of `Job.todo`, in order.

    If all outputs are paths of files, each grows chunk by chunk in PATH.partial and is renamed when all chunks are
    written. After an interruption, the same job skips a finished chunk if it and all chunks before it held the same
    items, and if `about`, the JSON values of all else that the outputs depend on, is the same. `say` gets a message
    when work resumes or starts again.

    Otherwise the outputs of a chunk are written as soon as they are made; a file among them appears at the end. An
    output whose name ends in .gz is a gzip file. `notes` are the notes before the first chunk.

    Raises: MtkitError if an output cannot be written or another process is writing it, and for an unfinished file that
    mtkit did not write.
    """
    files = [output for output in outputs if isinstance(output, Path) and not is_device(output)]
    with ExitStack() as stack:
        if len(files) < len(outputs):
            yield Job([_opened(output, stack) for output in outputs], notes)
            return
        try:
            with _file_job(files, about, notes, say) as job:
                yield job
        except BrokenPipeError:
            raise  # the reader of `say` or of what the body writes has left
        except OSError as error:
            raise WriteError(files, error) from error


@contextmanager
def _file_job(paths: Sequence[Path], about: Mapping[str, Any], notes: N, say: Say) -> Iterator[_FileJob[N]]:
    paths = [Path(os.path.realpath(path)) for path in paths]  # a link stays a link
    partials, (record, *_), locks = ([inside(path.parent, f"{path.name}{end}") for path in paths] for end in UNFINISHED)
    _check_unfinished(paths, partials, record)
    with ExitStack() as stack:
        for path, lock in zip(paths, locks, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, f"another process is writing {path}; wait for it, or choose another file"))
        files = [stack.enter_context(partial.open("ab")) for partial in partials]
        journal = stack.enter_context(Journal(record, about))
        if problem := journal.problem:
            say(f"{partials[0]} {problem}; the work starts again")
        stack.callback(_remove_if_empty, journal, [*partials, record])
        job = _FileJob(paths, files, journal, notes, say)
        yield job
        if job.complete:
            job.finish()


def _opened(output: Path | BinaryIO, stack: ExitStack) -> BinaryIO:
    """The output as a stream, until the stack ends."""
    if not isinstance(output, Path):
        return output
    if is_device(output):
        try:
            file = stack.enter_context(open_device(output))
        except OSError as error:
            raise WriteError([output], error) from error
    else:
        file = stack.enter_context(stack.enter_context(writing(output)).open("wb"))
    if output.suffix == ".gz":
        return cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
    return file


def _bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _check_unfinished(paths: Sequence[Path], partials: Sequence[Path], record: Path) -> None:
    """Raises: MtkitError for folders, and for unfinished outputs, or a journal of them, that mtkit did not write."""
    for path in paths:
        if path.is_dir():
            raise MtkitError(f"{path} is a folder; give the name of a file to write")
    is_ours = record.is_file() and is_journal(record)
    for partial in partials:
        if partial.exists() and not (partial.is_file() and (is_ours or not partial.stat().st_size)):
            raise MtkitError(f"{partial} exists without a record of mtkit in {record.name}; move it away")
    if record.exists() and not (is_ours or (record.is_file() and partials[0].exists())):
        raise MtkitError(f"{record} is not a record of mtkit; move it away")


def _remove_if_empty(journal: Journal, paths: Iterable[Path]) -> None:
    if journal.empty:
        for path in paths:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Part:
    """One of several parts of a job: the lines that begin in its share of a file's bytes, or its share of pairs."""

    number: int
    """Counted from 1."""
    of: int

    @classmethod
    def named(cls, name: str) -> "Part":
        """The part with the name 2/8. Raises: MtkitError for another form of name."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", name)
        number, of = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= of:
            raise MtkitError(f"--part {cut(name)} is no part; the second of eight is --part 2/8")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def output(self, path: Path) -> Path:
        """The file of this part of an output. Raises: MtkitError if it is a link."""
        return inside(path.parent, f"{path.name}.part-{self.number}-of-{self.of}")

    def record(self, output: Path) -> Path:
        """The file that records what this part of an output is made of. Raises: MtkitError if it is a link."""
        return inside(output.parent, f"{self.output(output).name}.json")


def all_parts(outputs: Sequence[Path], finished: Callable[[Part], bool], verb: str) -> list[Part]:
    """All parts of these outputs, by the names of their files; `verb` is what makes a part, for messages.

    Raises: DataError if one is missing or not `finished`, or if there are parts of different divisions.
    """
    names = re.compile(rf"{re.escape(outputs[0].name)}\.part-([0-9]+)-of-([0-9]+)(\.json)?")
    matches = [names.fullmatch(path.name) for path in outputs[0].parent.glob("*.part-*-of-*")]
    divisions = sorted({int(match[2]) for match in matches if match})
    if not divisions:
        raise DataError(f"no parts of {outputs[0]}; {verb} them first, with --part 1/8 to 8/8")
    if len(divisions) > 1:
        raise DataError(
            f"{outputs[0]} has parts of {' and of '.join(map(str, divisions))}; remove the parts that are not wanted"
        )
    parts = [Part(number + 1, divisions[0]) for number in range(divisions[0])]
    if missing := [part.number for part in parts if not finished(part)]:
        listed = ", ".join(map(str, missing[:LISTED]))
        more = f" and {len(missing) - LISTED:,} more" if len(missing) > LISTED else ""
        raise DataError(
            f"of {len(parts):,} parts of {' and '.join(map(str, outputs))}, {len(missing):,} are missing or not "
            f"finished: {listed}{more}; {verb} with --part {missing[0]}/{len(parts)} and so on"
        )
    return parts


def begin_outputs(record: Path, made_of: Mapping[str, Any], outputs: Sequence[Path]) -> bool:
    """Record what the outputs are made of, before they are; False if all exist and were made of just that.

    Outputs that were made of something else are removed. Each output must appear only when it is complete.

    Raises: MtkitError for files that mtkit did not write, and if the record cannot be written.
    """
    made_of = json.loads(json_text(made_of))
    existing = [output for output in outputs if output.exists()]
    recorded = None
    with suppress(OSError, ValueError):
        recorded = from_json(record_bytes(record))
    is_record = isinstance(recorded, dict) and recorded.keys() == made_of.keys()
    if record.exists() and not (record.is_file() and (existing or is_record)):
        raise MtkitError(f"{record} is not a record of mtkit; move it away")
    if existing and not record.exists():
        raise MtkitError(f"{existing[0]} exists, and mtkit has no record that it wrote it; move it away")
    if recorded == made_of:
        return not all(output.is_file() for output in outputs)
    for output in existing:
        output.unlink()
    write_json(record, made_of)
    return True
