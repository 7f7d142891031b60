"""A large file in parts: ranges of bytes that any machines translate, each into its own files, joined at the end.

text.de.part-2-of-8       the lines of part 2, which appear when they are complete
text.de.part-2-of-8.json  what they are made of: which lines of the input, their hash, the model and the settings
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import TypedDict

from mtkit.data.chunks import FilePart, all_parts
from mtkit.errors import DataError, MtkitError
from mtkit.storage.files import json_text, packed, write_json, writing
from mtkit.storage.records import Count, read_stored
from mtkit.text.readers import Span, next_line, open_file

_BLOCK = 1 << 20


class PartRecord(TypedDict):
    """What a part was made of: bytes `begin` to `end` of the input, the lines before and in them, and their hash."""

    begin: Count
    end: Count
    before: Count
    lines: Count
    sha256: str
    about: Any


def part_lines(path: Path, part: FilePart) -> Span:
    """The lines of a part; the file is read up to their beginning, to number them.

    Raises: DataError where the file cannot be read, is packed, or is a pipe.
    """
    check_parted(path)
    with open_file(path) as file:
        size = path.stat().st_size
        begin, end = (next_line(file, size * number // part.of) for number in (part.number - 1, part.number))
        return Span(begin, end, _counted(file, 0, begin)[0])


def check_parted(path: Path) -> None:
    """Raises: DataError for a file that cannot be read from the middle."""
    with open_file(path):
        if path.suffix == ".gz":
            raise DataError(f"{path} is packed, so parts of it cannot be read; unpack it first (gunzip -k {path})")
        if not path.is_file():
            raise DataError(f"{path} is not a file, so parts of it cannot be read; write its text to a file first")


def begin_part(part: FilePart, source: Path, span: Span, outputs: Sequence[Path], about: Mapping[str, Any]) -> bool:
    """Says beside the first output what the part is made of; False where just that part is finished already.

    `about` are the JSON values of all else that the outputs depend on. Files of the part that were made otherwise are
    removed. Raises: MtkitError where it cannot be written.
    """
    with open_file(source) as file:
        lines, sha256 = _counted(file, span.begin, span.end)
    record = PartRecord(
        begin=span.begin,
        end=span.end,
        before=span.before,
        lines=lines,
        sha256=sha256,
        about=json.loads(json_text(about)),
    )
    made = [part.output(output) for output in outputs]
    kept, there = part.record(outputs[0]), [each for each in made if each.exists()]
    if kept.exists() and not (kept.is_file() and (there or _recorded(part, outputs[0]) is not None)):
        raise MtkitError(f"{kept} is not a record of mtkit; move it away")
    if there and not kept.exists():
        raise MtkitError(f"{there[0]} exists, and mtkit has no record that it wrote it; move it away")
    if _recorded(part, outputs[0]) == record:
        return not all(each.is_file() for each in made)
    for each in made:
        each.unlink(missing_ok=True)
    write_json(kept, record)
    return True


def join_parts(source: Path, outputs: Sequence[Path]) -> tuple[int, int]:
    """Writes the outputs from those of all parts of the source, which stay; gives the numbers of parts and lines.

    Raises: DataError for a part that is missing, has a damaged record, was made of other text or with another model or
    settings than the first, or does not have the lines that it must have; each message names the part.
    """
    check_parted(source)
    parts = _parts(outputs)
    records = [_read(part, outputs[0]) for part in parts]
    end = before = 0
    with open_file(source) as file:
        for part, record in zip(parts, records, strict=True):
            again = f"translate it again with --part {part}"
            if record["about"] != records[0]["about"]:
                raise DataError(f"part {part} was made with another model or other settings than part 1; {again}")
            lines, sha256 = _counted(file, record["begin"], record["end"])
            if record != PartRecord(
                begin=end, end=record["end"], before=before, lines=lines, sha256=sha256, about=record["about"]
            ):
                raise DataError(f"part {part} was made of other text than {source} has; {again}")
            end, before = record["end"], before + lines
            for path in map(part.output, outputs):
                with open_file(path) as written:
                    there, _ = _counted(written, 0, path.stat().st_size)
                if there != lines:
                    raise DataError(f"{path} has {there:,} lines, and its part of {source} {lines:,}; {again}")
        if end != source.stat().st_size:
            raise DataError(f"{source} has grown since its parts were translated; translate them again")
    for output in outputs:
        with writing(output) as temporary, temporary.open("wb") as whole:
            for path in (part.output(output) for part in parts):
                with open_file(path) as written:
                    while block := written.read(_BLOCK):
                        whole.write(packed(output, block))
            if not before:
                whole.write(packed(output, b""))
    return len(parts), before


def _parts(outputs: Sequence[Path]) -> list[FilePart]:
    """All parts. Raises: DataError where one is missing, or where files are parts of different divisions."""
    return all_parts(
        outputs,
        lambda part: part.record(outputs[0]).is_file() and all(part.output(each).is_file() for each in outputs),
        "translate",
    )


def _read(part: FilePart, output: Path) -> PartRecord:
    """The record of a part. Raises: DataError if it is missing or damaged."""
    advice = f"translate that part again with --part {part}"
    return read_stored(part.record(output), PartRecord, advice, error=DataError)


def _recorded(part: FilePart, output: Path) -> PartRecord | None:
    """The record of a part; None if it is missing or damaged."""
    try:
        return _read(part, output)
    except DataError:
        return None


def _counted(file: BinaryIO, begin: int, end: int) -> tuple[int, str]:
    """The number and the SHA-256 of the lines between two places."""
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    file.seek(begin)
    left = end - begin
    while block := file.read(min(_BLOCK, left)):
        digest.update(block)
        lines, last, left = lines + block.count(b"\n"), block[-1:], left - len(block)
    return lines + (last != b"\n"), digest.hexdigest()
