"""The destination of output lines: a file, which appears only when complete, a device or pipe, or a stream."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.stream import Item, Together, Work, to_file, to_stream
from mtkit.files import write_text


def write_lines(
    items: Iterable[Item],
    work: Work,
    output: Path | BinaryIO,
    about: Callable[[], Mapping[str, Any]],
    *,
    together: Together | None = None,
    live: bool = False,
    say: Callable[[str], object],
    on_skip: Callable[[int], object],
) -> Notes:
    """Writes by `to_file`, which resumes, if `output` is the path of a file; otherwise by `to_stream`.

    `about` gives the values that `to_file` compares, and is called only for a file.
    """
    if not isinstance(output, Path):
        return to_stream(items, work, output, together=together, live=live)
    if is_device(output):
        with output.open("wb") as pipe:
            return to_stream(items, work, pipe, together=together, live=live)
    return to_file(items, work, output, about(), together=together, say=say, on_skip=on_skip)


def write_whole(output: Path, text: str) -> None:
    """Writes a text as a whole. Raises: MtkitError where it cannot be written."""
    if is_device(output):
        with output.open("wb") as pipe:
            pipe.write(text.encode())
    else:
        write_text(output, text)


def is_device(path: Path) -> bool:
    """Whether the path is a device or a pipe, which no file may replace; /dev/stdout always counts as one."""
    descriptor = str(path) in ("/dev/stdout", "/dev/stderr") or path.parts[:3] == ("/", "dev", "fd")
    return path.exists() and (descriptor or not path.is_file())
