"""`mtkit plot`: draw the attention weights of every layer and head."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.cli.align import NO_FONT, attend
from mtkit.cli.options import Checkpoint, Device, Direction, RunFolder, RunName, Threads, Translation, use_threads
from mtkit.errors import MtkitError

plot = typer.Typer(invoke_without_command=True)


@plot.callback()
def _plot(context: typer.Context) -> None:
    """Draw what a run attends to.

    \b
    Examples:
      mtkit plot attention --source "The boy sleeps."
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@plot.command()
def attention(
    source: Annotated[str, typer.Option(metavar="TEXT", help="Source text: one line.")],
    target: Translation = None,
    name: RunName = None,
    run: RunFolder = None,
    direction: Direction = None,
    checkpoint: Checkpoint = "best",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture (PNG).  [default: attention.png]")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw the attention of every layer and head.

    Each row of maps is a layer: first of the attention to the source, then of the encoder, then of the decoder. A map
    has the pieces attended to across, and the pieces that attend down. Layers whose mechanism has no weights are left
    out.

    \b
    Examples:
      mtkit plot attention --source "The boy sleeps."
      mtkit plot attention --name rnn --source "The boy sleeps." --target "Der Junge schläft." --output map.png
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MtkitError("pictures need matplotlib; install it: pip install 'mtkit[plots]'") from error

    from mtkit.evaluation.plots import draw_attention
    from mtkit.storage.files import check_outputs, inside

    output = inside(Path(), "attention.png") if output is None else output
    check_outputs([output])
    use_threads(threads)
    has_fonts = draw_attention(attend(source, target, run, name, direction, checkpoint, device), output)
    typer.echo(f"{output}" + ("" if has_fonts else NO_FONT))
