"""`mtkit plot`: pictures of what a run does."""

import typer

from mtkit.cli.plot.attention import attention

plot = typer.Typer(help="Draw what a run attends to.", invoke_without_command=True)


@plot.callback()
def _plot(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


plot.command()(attention)
