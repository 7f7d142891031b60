"""The journal of a resumable job (`mtkit.storage.jobs`): which of its chunks are finished, and their sizes."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtkit.storage.files import json_text


@dataclass(frozen=True)
class Finished:
    """A finished chunk."""

    sha256: str
    """The fingerprint of its items."""
    ends: tuple[int, ...]
    """The size of each output up to the end of this chunk, in bytes."""
    notes: list[Any]
    """The state of the notes on this chunk and all before it."""


class Journal(AbstractContextManager["Journal"]):
    """The journal of a job: JSON Lines, one for all that the job depends on and one for each finished chunk.

    A line is added when its chunk is on the disk, so that the work per chunk does not grow. A kill can leave half of
    the last line, which is ignored.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """`about` are the JSON values of all that the outputs depend on, except the items.

        Raises: OSError if the file cannot be read and written.
        """
        self._file = path.open("a+b")
        self._head = _json_line({"about": about})
        self._file.seek(0)
        head = self._file.readline()
        self.problem: str | None = None
        """The reason why nothing in it is valid; None if something is, or if it is new."""
        if head not in (self._head, b""):
            known = _is_head(head)
            self.problem = (
                "was made with another model or other settings" if known else "has no record that can be read"
            )

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def empty(self) -> bool:
        """Whether it contains no chunk, not even one that is not valid."""
        return self.problem is None and os.fstat(self._file.fileno()).st_size <= len(self._head)

    def finished(self, sizes: Sequence[int], restored: Callable[[Any], object]) -> Iterator[tuple[int, Finished]]:
        """The finished chunks if the outputs have these sizes in bytes, each with the position of the end of its line.

        They end at the first line that is torn or damaged, has notes for which `restored` raises an error, or exceeds
        the outputs.
        """
        self._file.seek(0)
        if (line := self._file.readline()) != self._head:
            return
        place, begins = len(line), (0,) * len(sizes)
        while (line := self._file.readline()).endswith(b"\n"):
            with suppress(ValueError, KeyError, TypeError):
                content = from_json(line)
                chunk = Finished(str(content["sha256"]), tuple(map(int, content["ends"])), content["notes"])
                restored(chunk.notes)
                limits = zip(begins, chunk.ends, sizes, strict=True)
                if all(begin <= end <= size for begin, end, size in limits):
                    place, begins = place + len(line), chunk.ends
                    yield place, chunk
                    continue
            return

    def keep(self, end: int) -> None:
        """Drop all lines from this position on; 0 starts the journal again."""
        self._file.truncate(end)
        if end == 0:
            self.problem = None
            self._file.write(self._head)
        self._sync()

    def add(self, chunk: Finished) -> None:
        """Record a chunk whose outputs are on the disk."""
        self._file.write(_json_line(asdict(chunk)))
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def is_journal(path: Path) -> bool:
    """Whether the file is a journal: empty, or with a readable first line."""
    with path.open("rb") as file:
        head = file.readline()
    return head == b"" or _is_head(head)


def _is_head(line: bytes) -> bool:
    try:
        return "about" in from_json(line)
    except (ValueError, TypeError):
        return False


def _json_line(content: Mapping[str, Any]) -> bytes:
    return (json_text(content) + "\n").encode()
