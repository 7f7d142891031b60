"""The record of an unfinished output: JSON Lines, one for all of it and one for each finished chunk.

A line is added when its chunk is on the disk, so the work per chunk does not grow with the chunks before it. A kill can
leave half of the last line, which does not count.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json

from mtkit.decoding.lines.notes import Notes
from mtkit.storage.files import json_text


@dataclass(frozen=True)
class Finished:
    """A finished chunk."""

    sha256: str
    """Of its items."""
    ends: tuple[int, ...]
    """The size of each output with this chunk at its end."""
    notes: list[Any]
    """The state of the notes on this chunk and all before it."""

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """The chunk of a line of the record; None where the line is none."""
        try:
            found = from_json(line)
            chunk = cls(str(found["sha256"]), tuple(map(int, found["ends"])), found["notes"])
            Notes.restored(chunk.notes)
        except (ValueError, KeyError, TypeError):
            return None
        return chunk


class Journal(AbstractContextManager["Journal"]):
    """The record at a path, for outputs that depend on their items and on `about`, JSON values, alone."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Raises: OSError where it cannot be read and written."""
        self._file = path.open("a+b")
        self._head = _line({"about": about})

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def empty(self) -> bool:
        """Whether it tells of no chunk."""
        # the size first: to read again what a full disk did not take raises the same error
        return os.fstat(self._file.fileno()).st_size <= len(self._head) or self.problem is not None

    @property
    def problem(self) -> str | None:
        """The reason why nothing of the record counts; None where something does, or nothing was recorded."""
        self._file.seek(0)
        head = self._file.readline()
        if head in (self._head, b""):
            return None
        whole = _is_head(head)
        return "was made with another model or other settings" if whole else "has no record that can be read"

    def finished(self, sizes: Sequence[int]) -> Iterator[tuple[int, Finished]]:
        """The finished chunks of outputs that have these sizes now, each with the place where its line ends.

        The first line that is torn or damaged, or tells of more than the outputs have, ends them.
        """
        self._file.seek(0)
        if (line := self._file.readline()) != self._head:
            return
        place, before = len(line), (0,) * len(sizes)
        while (line := self._file.readline()).endswith(b"\n"):
            chunk = Finished.read(line)
            if chunk is None or len(chunk.ends) != len(sizes):
                return
            if not all(low <= end <= size for low, end, size in zip(before, chunk.ends, sizes, strict=True)):
                return
            place, before = place + len(line), chunk.ends
            yield place, chunk

    def keep(self, end: int) -> None:
        """Drop all lines from this place on; 0 begins the record anew."""
        self._file.truncate(end)
        if end == 0:
            self._file.write(self._head)
        self._to_disk()

    def add(self, chunk: Finished) -> None:
        """Record a chunk whose outputs are on the disk."""
        self._file.write(_line(asdict(chunk)))
        self._to_disk()

    def _to_disk(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def is_journal(path: Path) -> bool:
    """Whether the file at the path is a record, empty or with a readable first line."""
    with path.open("rb") as file:
        head = file.readline()
    return head == b"" or _is_head(head)


def _is_head(line: bytes) -> bool:
    try:
        return "about" in from_json(line)
    except (ValueError, TypeError):
        return False


def _line(content: Mapping[str, Any]) -> bytes:
    return (json_text(content) + "\n").encode()
