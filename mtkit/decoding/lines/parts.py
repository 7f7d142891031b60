"""Parts of a large text file: ranges of bytes that any machines translate into files of their own, joined at the end.

text.de.part-2-of-8       the lines of part 2; it appears when it is complete
text.de.part-2-of-8.json  what they are made of: which lines of the input, their hash, the model and the settings
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from typing_extensions import TypedDict

from mtkit.errors import DataError
from mtkit.storage.files import WriteError, packed, writing
from mtkit.storage.jobs import Part, all_parts, begin_outputs
from mtkit.storage.records import Count, read_stored
from mtkit.text.text_files import Span, next_line, open_file

_BLOCK = 1 << 20


class PartRecord(TypedDict):
    """The origin of a part: bytes `begin` to `end` of the input, the number of lines before and in them, their hash."""

    begin: Count
    end: Count
    before: Count
    lines: Count
    sha256: str
    about: Any


def part_lines(path: Path, part: Part) -> Span:
    """Return the lines of a part; the file is read up to the first of them, to number them.

    Raises: DataError if the file cannot be read from the middle.
    """
    _check_seekable(path)
    with open_file(path) as file:
        size = path.stat().st_size
        begin, end = (next_line(file, size * number // part.of) for number in (part.number - 1, part.number))
        return Span(begin, end, _count(file, 0, begin)[0])


def _check_seekable(path: Path) -> None:
    with open_file(path):
        if path.suffix == ".gz":
            raise DataError(f"{path} is packed, so parts of it cannot be read; unpack it first (gunzip -k {path})")
        if not path.is_file():
            raise DataError(f"{path} is not a file, so parts of it cannot be read; write its text to a file first")


def begin_part(part: Part, source: Path, span: Span, outputs: Sequence[Path], about: Mapping[str, Any]) -> bool:
    """Record what the part is made of, before it is translated; return False if this same part is finished already.

    `about` are the JSON values of all else that the outputs depend on. Raises: MtkitError as `begin_outputs`.
    """
    with open_file(source) as file:
        lines, sha256 = _count(file, span.begin, span.end)
    record = PartRecord(
        begin=span.begin, end=span.end, before=span.before, lines=lines, sha256=sha256, about=dict(about)
    )
    return begin_outputs(part.record(outputs[0]), cast("Mapping[str, Any]", record), [*map(part.output, outputs)])


def join_parts(source: Path, outputs: Sequence[Path]) -> tuple[int, int]:
    """Write the outputs from all parts of the source, which stay; returns the numbers of parts and lines.

    Raises: DataError for a part that is missing, has a damaged record, was made of other text or with another model or
    settings than the first, or does not have as many lines as its text; each message names the part.
    """
    _check_seekable(source)
    parts = all_parts(
        outputs,
        lambda part: all(path.is_file() for path in (part.record(outputs[0]), *map(part.output, outputs))),
        "translate",
    )
    records = [
        read_stored(
            part.record(outputs[0]), PartRecord, f"translate that part again with --part {part}", error=DataError
        )
        for part in parts
    ]
    end = total = 0
    with open_file(source) as file:
        for part, record in zip(parts, records, strict=True):
            again = f"translate it again with --part {part}"
            if record["about"] != records[0]["about"]:
                raise DataError(f"part {part} was made with another model or other settings than part 1; {again}")
            lines, sha256 = _count(file, record["begin"], record["end"])
            if record != {**record, "begin": end, "before": total, "lines": lines, "sha256": sha256}:
                raise DataError(f"part {part} was made of other text than {source} has; {again}")
            end, total = record["end"], total + lines
            for path in map(part.output, outputs):
                with open_file(path) as output_lines:
                    translated, _ = _count(output_lines, 0, path.stat().st_size)
                if translated != lines:
                    raise DataError(f"{path} has {translated:,} lines, and its part of {source} {lines:,}; {again}")
        if end != source.stat().st_size:
            raise DataError(f"{source} has grown since its parts were translated; translate them again")
    for output in outputs:
        with writing(output) as temporary, temporary.open("wb") as joined:
            for path in (part.output(output) for part in parts):
                with open_file(path) as output_lines:
                    while block := output_lines.read(_BLOCK):
                        try:
                            joined.write(packed(output, block))
                        except OSError as error:  # not one of the file that is read
                            raise WriteError([output], error) from error
            if not total:
                joined.write(packed(output, b""))
    return len(parts), total


def _count(file: BinaryIO, begin: int, end: int) -> tuple[int, str]:
    """Return the number of lines between two positions, and the SHA-256 of their bytes."""
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    file.seek(begin)
    left = end - begin
    while block := file.read(min(_BLOCK, left)):
        digest.update(block)
        lines, last, left = lines + block.count(b"\n"), block[-1:], left - len(block)
    return lines + (last != b"\n"), digest.hexdigest()
