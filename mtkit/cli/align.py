"""`mtkit align`: which source pieces a run attends to for each piece of a translation, as a table and a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli.progress import note

if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment

SHOWN = 3
"""Source pieces in a row of the table, those with the largest weights."""


def align(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Source text: one line.")],
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its translation.  [default: the one that the run finds]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in mtkit-runs.  [default: the latest run]")] = None,
    run: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder.")] = None,
    direction: Annotated[
        str | None, typer.Option(metavar="EN-FR", help="Direction; required for runs with several.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: best, last, average or a name.")] = "best",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture (PNG), where matplotlib is installed.  [default: alignment.png]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
) -> None:
    """Show what a run attends to for each piece.

    The table shows the source pieces with the largest weights; the picture shows all weights. Weights are those of the
    last layer, averaged over its heads.

    \b
    Examples:
      mtkit align "The boy sleeps."
      mtkit align "The boy sleeps." --target "Der Junge schläft." --name rnn --output boy.png
    """
    import torch

    from mtkit.decoding.translator import Translator
    from mtkit.evaluation.plots import draw_alignment
    from mtkit.runs import find_run
    from mtkit.storage.files import check_outputs, inside

    output = inside(Path(), "alignment.png") if output is None else output
    check_outputs([output])
    if threads is not None:
        torch.set_num_threads(threads)
    found = find_run(run, name)
    translator = Translator([found], found.recipe.decoding, checkpoint=checkpoint, device=device, engine="mtkit")
    whole_text = translator.align(text, target, direction=direction)
    if left_out := whole_text.left_out():
        note(left_out)
    aligned = whole_text.first()
    typer.echo(_table(aligned))
    try:
        whole = draw_alignment(aligned.source, aligned.target, aligned.weights.tolist(), output)
    except ModuleNotFoundError:
        typer.echo("\nno picture: matplotlib is not installed")
    else:
        typer.echo(f"\n{output}" + ("" if whole else " (letters without an installed font are boxes)"))


def _table(aligned: "Alignment") -> str:
    """A line for each piece of the translation."""
    from mtkit import terminal

    rows = [("piece", "source pieces and their weights")]
    for piece, row in zip(aligned.target, aligned.weights, strict=True):
        weights, places = row.topk(min(SHOWN, len(row)))
        pairs = zip(places.tolist(), weights.tolist(), strict=True)
        rows.append((piece, "  ".join(f"{aligned.source[at]} {weight:.2f}" for at, weight in pairs)))
    return terminal.aligned(rows, left=(0, 1))
