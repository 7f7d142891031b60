"""`mtkit plot attention`: the attention weights of every layer and head, as small maps over the pieces.

`mtkit plot`: pictures of what a run does.
"""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.cli.progress import note
from mtkit.errors import MtkitError


def attention(
    source: Annotated[str, typer.Option(metavar="TEXT", help="Source text: one line.")],
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
        Path | None, typer.Option(metavar="FILE", help="Picture (PNG).  [default: attention.png]")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
) -> None:
    """Draw the attention of every layer and head.

    Each row of maps is a layer: of the attention to the source, then of the encoder, then of the decoder. Across are
    the pieces attended to, down those that attend. Layers whose mechanism has no weights are left out.

    \b
    Examples:
      mtkit plot attention --source "The boy sleeps."
      mtkit plot attention --name rnn --source "The boy sleeps." --target "Der Junge schläft." --output map.png
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MtkitError("pictures need matplotlib; install it: pip install 'mtkit[plots]'") from error

    import torch

    from mtkit.decoding.translator import Translator
    from mtkit.evaluation.plots import draw_attention
    from mtkit.runs import find_run
    from mtkit.storage.files import check_outputs, inside

    output = inside(Path(), "attention.png") if output is None else output
    check_outputs([output])
    if threads is not None:
        torch.set_num_threads(threads)
    found = find_run(run, name)
    translator = Translator([found], found.recipe.decoding, checkpoint=checkpoint, device=device, engine="mtkit")
    aligned = translator.align(source, target, direction=direction)
    if left_out := aligned.left_out():
        note(left_out)
    whole = draw_attention(aligned.first(), output)
    typer.echo(f"{output}" + ("" if whole else " (letters without an installed font are boxes)"))


plot = typer.Typer(help="Draw what a run attends to.", invoke_without_command=True)


@plot.callback()
def _plot(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


plot.command()(attention)
