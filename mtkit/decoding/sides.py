"""Translation of a held-out side, chunk by chunk: the same call after an interruption goes on behind the last chunk.

Until all of it is there, translations lie beside the others of the run, a line of JSON for each segment, in
`.test.jsonl.partial` with the record of `mtkit.decoding.lines.stream.to_file`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtkit.decoding.held_out import HeldOut, Speed
from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.output import write_lines
from mtkit.decoding.lines.stream import Item
from mtkit.decoding.translate import OnProgress, Translation
from mtkit.errors import MtkitError
from mtkit.files import inside, json_text

CHUNK = 1_000
"""Segments translated together, at most; what is lost by a kill."""

Timed = Callable[[HeldOut, int], tuple[list[list[Translation]], Speed]]
"""Translates a part of a side, of which the first segment has this number in the side, from 0."""


def translate_side(
    side: HeldOut,
    translated: Timed,
    folder: Path,
    about: dict[str, Any],
    *,
    joined: bool,
    say: Callable[[str], object] = lambda message: None,
    on_progress: OnProgress = lambda lines: None,
) -> tuple[list[list[Translation]], Speed]:
    """The translations of all segments, and their speed; the time of interrupted calls counts.

    `about`: the JSON values of all that translations depend on besides the side. `joined` segments of a document stay
    in one chunk. `say` gets a message when work resumes or starts again.

    Raises: MtkitError where the folder cannot be written, or another process is translating the side.
    """
    path = inside(folder, f".{side.name}.jsonl")
    ways = side.directions.names_of_lines() if side.directions else [""] * len(side.sources)
    documents = [str(each) for each in side.documents.ids] if joined and side.documents else [""] * len(side.sources)

    def work(first: int, chunk: list[Item]) -> tuple[Sequence[Iterable[str]], Notes]:
        found, speed = translated(side.at(range(first, first + len(chunk))), first)
        share = speed.seconds / len(chunk)
        return [[json_text({"seconds": share, "found": [*map(asdict, each)]}) for each in found]], Notes()

    def together(one: Item, other: Item) -> bool:
        return one[2] == other[2] != ""

    write_lines(
        zip(side.sources, ways, documents, strict=True),
        work,
        [path],
        lambda: about,
        together=together,
        size=CHUNK,
        say=say,
        on_skip=on_progress,
    )
    found, seconds = _read(path)
    return found, Speed(seconds, len(found), sum(len(best.pieces) for best, *_ in found))


def _read(path: Path) -> tuple[list[list[Translation]], float]:
    """The translations in a file, which is then removed, and their seconds. Raises: MtkitError where it is damaged."""
    found, seconds = list[list[Translation]](), 0.0
    try:
        for line in path.read_bytes().splitlines():
            row = from_json(line)
            found.append([_translation(each) for each in row["found"]])
            seconds += row["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        raise MtkitError(f"{path} is damaged; the same command translates that side anew") from error
    finally:
        path.unlink()
    return found, seconds


def _translation(row: dict[str, Any]) -> Translation:
    """The translation of JSON values, in which null stands for minus infinity."""
    row |= {name: -inf for name in ("score", "log_prob") if row[name] is None}
    return Translation(**row | {"pieces": tuple(row["pieces"]), "of_parts": tuple(map(_translation, row["of_parts"]))})
