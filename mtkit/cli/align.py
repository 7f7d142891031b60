"""`mtkit align`: show which source pieces a run attends to for each piece of a translation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from mtkit.cli.options import (
    Checkpoint,
    Device,
    Direction,
    RunFolder,
    RunName,
    Threads,
    Translation,
    output_path,
    use_threads,
)
from mtkit.cli.progress import note

if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment

SHOWN = 3
"""Source pieces in a row of the table: those with the largest weights."""

NO_FONT = " (letters without an installed font are boxes; install one, e.g. apt-get install fonts-noto-cjk)"


def align(
    text: Annotated[str, Argument(metavar="TEXT", help="Source text: one line.")],
    target: Translation = None,
    name: RunName = None,
    run: RunFolder = None,
    direction: Direction = None,
    checkpoint: Checkpoint = "best",
    output: Annotated[
        Path | None, Option(metavar="FILE", help="Picture (PNG), if matplotlib is installed.  [default: alignment.png]")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Show what a run attends to for each piece.

    The table shows the source pieces with the largest weights; the picture shows all weights. Weights are means over
    the heads of the last layer.

    \b
    Examples:
      mtkit align "The boy sleeps."
      mtkit align "The boy sleeps." --target "Der Junge schläft." --name rnn --output boy.png
    """
    from mtkit.evaluation.pictures.attention import draw_alignment

    output = output_path(output, "alignment.png")
    use_threads(threads)
    alignment = attend(text, target, run, name, direction, checkpoint, device, ["cross"])
    typer.echo(_table(alignment))
    try:
        has_fonts = draw_alignment(alignment.source, alignment.target, alignment.weights.tolist(), output)
    except ModuleNotFoundError:
        typer.echo("\nno picture: matplotlib is not installed")
    else:
        typer.echo(f"\n{output}" + ("" if has_fonts else NO_FONT))


def attend(
    source: str,
    target: str | None,
    run: Path | None,
    name: str | None,
    direction: str | None,
    checkpoint: str,
    device: str,
    roles: Sequence[str],
) -> "Alignment":
    """Align a source with its translation, by default the run's; print a note if a part of a long text is left out.

    The attention of these `roles` has weights.
    """
    from mtkit.decoding.translator import Translator
    from mtkit.runs import find_run

    translator = Translator([find_run(run, name)], checkpoint=checkpoint, device=device, engine="mtkit")
    alignment = translator.align(source, target, direction=direction, roles=roles)
    if left_out := alignment.left_out():
        note(left_out)
    return alignment.first()


def _table(alignment: "Alignment") -> str:
    """Return a line for each piece of the translation."""
    from mtkit.terminal import aligned

    rows = [("piece", "source pieces and their weights")]
    for piece, row in zip(alignment.target, alignment.weights, strict=True):
        weights, places = row.topk(min(SHOWN, len(row)))
        pairs = zip(places.tolist(), weights.tolist(), strict=True)
        rows.append((piece, "  ".join(f"{alignment.source[place]} {weight:.2f}" for place, weight in pairs)))
    return aligned(rows, left=(0, 1))
