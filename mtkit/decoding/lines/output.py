"""The destinations of output lines: files, which appear only when complete, devices or pipes, and streams."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.stream import Item, Together, Work, to_file, to_stream
from mtkit.errors import MtkitError
from mtkit.files import check_writable, write_text, writing


def write_lines(
    items: Iterable[Item],
    work: Work,
    outputs: Sequence[Path | BinaryIO],
    about: Callable[[], Mapping[str, Any]],
    *,
    together: Together | None = None,
    live: bool = False,
    size: int | None = None,
    say: Callable[[str], object],
    on_skip: Callable[[int], object],
) -> Notes:
    """Writes by `to_file`, which resumes, if all outputs are the paths of files; otherwise by `to_stream`.

    `about` gives the values that `to_file` compares, and is called only for files. `size` is that of its chunks.

    Raises: MtkitError where two outputs are the same file, and as `to_file`.
    """
    files = [each for each in outputs if isinstance(each, Path) and not is_device(each)]
    if len({os.path.realpath(each) for each in files}) < len(files):
        raise MtkitError(f"{files[0]} cannot hold two outputs; give each a file of its own")
    if len(files) == len(outputs):
        return to_file(items, work, files, about(), together=together, size=size, say=say, on_skip=on_skip)
    with ExitStack() as stack:

        def opened(output: Path | BinaryIO) -> BinaryIO:
            if not isinstance(output, Path):
                return output
            path = output if is_device(output) else stack.enter_context(writing(output))
            return stack.enter_context(path.open("wb"))

        return to_stream(items, work, [opened(each) for each in outputs], together=together, live=live)


def write_whole(output: Path, text: str) -> None:
    """Writes a text as a whole. Raises: MtkitError where it cannot be written."""
    if is_device(output):
        with output.open("wb") as pipe:
            pipe.write(text.encode())
    else:
        write_text(output, text)


def check_output(output: Path) -> None:
    """Finds out before the decoding. Raises: MtkitError where the output cannot be written."""
    if not is_device(output):
        check_writable(output)


def is_device(path: Path) -> bool:
    """Whether the path is a device or a pipe, which no file may replace; /dev/stdout always counts as one."""
    descriptor = str(path) in ("/dev/stdout", "/dev/stderr") or path.parts[:3] == ("/", "dev", "fd")
    return path.exists() and (descriptor or not (path.is_file() or path.is_dir()))
