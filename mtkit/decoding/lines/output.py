"""Where lines of output go: a file, which a kill cannot halve, a device or pipe, or a stream."""

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
    """As `to_file` where `output` is the path of a file, resumed where a kill stopped it; else as `to_stream`.

    `about` gives what `to_file` compares, and is asked by nobody else.
    """
    if not isinstance(output, Path):
        return to_stream(items, work, output, together=together, live=live)
    if is_device(output):
        with output.open("wb") as pipe:
            return to_stream(items, work, pipe, together=together, live=live)
    return to_file(items, work, output, about(), together=together, say=say, on_skip=on_skip)


def write_whole(output: Path, text: str) -> None:
    """Write a text at once. Raises: MtkitError where it cannot be written."""
    if is_device(output):
        with output.open("wb") as pipe:
            pipe.write(text.encode())
    else:
        write_text(output, text)


def is_device(path: Path) -> bool:
    """Whether it is a device or a pipe, whose place no file must take; /dev/stdout is one wherever it leads."""
    descriptor = str(path) in ("/dev/stdout", "/dev/stderr") or path.parts[:3] == ("/", "dev", "fd")
    return path.exists() and (descriptor or not path.is_file())
