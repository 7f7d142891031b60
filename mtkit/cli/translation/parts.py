"""A file in parts: which part this process translates, on which device, and the joining of all."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtkit.cli.translation.notes import note
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.data.lines.parts import FilePart


def check_parts(part: str | None, join: bool, input: str | None, output: Path | None, target: Path | None) -> None:
    """Raises: MtkitError for options that do not go with --part and --join."""
    given = "--join" if join else "--part"
    if part is not None and join:
        raise MtkitError("--part translates and --join joins what is translated; leave one out")
    if (part is not None or join) and (input in (None, "-") or output is None):
        raise MtkitError(f"{given} needs --input FILE and --output FILE, the same for all parts")
    if (part is not None or join) and target is not None:
        raise MtkitError(f"{given} is of translations that the run finds; leave --target out")


def own_part(
    part: str | None, input: str | None, output: Path | None, target: Path | None, device: str
) -> "tuple[FilePart | None, str]":
    """The part of --input for this process, and its device; each process of torchrun has a part and a GPU of its own.

    Raises: MtkitError for a name that is no part, and for processes of torchrun without a file of which to take parts.
    """
    from mtkit.data.lines.parts import FilePart
    from mtkit.training.distributed.world import World

    world = World(device)
    if world.size == 1:
        return None if part is None else FilePart.named(part), device
    if part is not None:
        raise MtkitError(
            "each process of torchrun translates a part; leave --part out, or start mtkit without torchrun"
        )
    if input in (None, "-") or output is None or target is not None:
        raise MtkitError("torchrun translates parts of a file; give --input FILE and --output FILE, and no --target")
    return FilePart(world.rank + 1, world.size), str(world.device)


def join(input: Path, output: Path, alignments: Path | None) -> None:
    """Join the finished parts. Raises: DataError as `mtkit.decoding.lines.parts.join_parts`."""
    from mtkit.decoding.lines.parts import join_parts

    outputs = [output] if alignments is None else [output, alignments]
    parts, lines = join_parts(input, outputs)
    typer.echo(f"{lines:,} lines of {parts:,} parts: {' and '.join(map(str, outputs))}")
    note(f"the parts stay; remove them with rm {output}.part-*")
