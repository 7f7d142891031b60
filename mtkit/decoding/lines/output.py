"""The destinations of output lines: files, which appear only when complete, devices or pipes, and streams."""

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.stream import Item, Together, Work, to_file, to_stream
from mtkit.storage.files import is_device, writing


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

    Raises: MtkitError as `to_file`.
    """
    files = [each for each in outputs if isinstance(each, Path) and not is_device(each)]
    if len(files) == len(outputs):
        return to_file(items, work, files, about(), together=together, size=size, say=say, on_skip=on_skip)
    with ExitStack() as stack:

        def opened(output: Path | BinaryIO) -> BinaryIO:
            if not isinstance(output, Path):
                return output
            path = output if is_device(output) else stack.enter_context(writing(output))
            file = stack.enter_context(path.open("wb"))
            if output.suffix == ".gz":
                return cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
            return file

        return to_stream(items, work, [opened(each) for each in outputs], together=together, live=live)
