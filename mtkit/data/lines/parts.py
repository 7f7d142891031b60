"""Parts of a large file or text, which any machines work on; the parts of one division, found beside their output."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtkit.errors import DataError, MtkitError, cut
from mtkit.files import inside

_NAMED = 10


@dataclass(frozen=True)
class FilePart:
    """One of several parts: of a file, the lines that begin in its share of the bytes; of text, its share of pairs."""

    number: int
    """From 1."""
    of: int

    @classmethod
    def named(cls, name: str) -> "FilePart":
        """The part that is called 2/8. Raises: MtkitError for another form of name."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", name)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise MtkitError(f"--part {cut(name)} is no part; the second of eight is --part 2/8")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def output(self, path: Path) -> Path:
        """The file of this part of an output. Raises: MtkitError if it is a link."""
        return inside(path.parent, f"{path.name}.part-{self.number}-of-{self.of}")

    def record(self, output: Path) -> Path:
        """The file that tells what this part of an output is made of. Raises: MtkitError if it is a link."""
        return inside(output.parent, f"{self.output(output).name}.json")


def all_parts(outputs: Sequence[Path], finished: Callable[[FilePart], bool], verb: str) -> list[FilePart]:
    """The parts of these outputs, by the files beside them; `verb` says what makes a part, for messages.

    Raises: DataError where one is missing or not `finished`, or where files are parts of different divisions.
    """
    names = re.compile(rf"{re.escape(outputs[0].name)}\.part-([0-9]+)-of-([0-9]+)(\.json)?")
    found = [names.fullmatch(each.name) for each in outputs[0].parent.glob("*.part-*-of-*")]
    divisions = sorted({int(each[2]) for each in found if each})
    if not divisions:
        raise DataError(f"no parts of {outputs[0]}; {verb} them first, with --part 1/8 to 8/8")
    if len(divisions) > 1:
        raise DataError(
            f"{outputs[0]} has parts of {' and of '.join(map(str, divisions))}; remove those that are not wanted"
        )
    parts = [FilePart(number + 1, divisions[0]) for number in range(divisions[0])]
    if missing := [part.number for part in parts if not finished(part)]:
        listed = ", ".join(map(str, missing[:_NAMED]))
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise DataError(
            f"of {len(parts):,} parts of {' and '.join(map(str, outputs))}, {len(missing):,} are missing or not "
            f"finished: {listed}{more}; {verb} with --part {missing[0]}/{len(parts)} and so on"
        )
    return parts
