"""`mtkit tasks`: list the built-in tasks, or show one with its options and an example."""

from typing import Annotated

import typer
from typer import Argument


def tasks(
    name: Annotated[str | None, Argument(metavar="NAME", help="Show this task with its options.")] = None,
) -> None:
    """List the built-in tasks, or show one with an example.

    A task is text, drawn from a seed, on which attention mechanisms differ: `mtkit prepare --task NAME`.

    \b
    Examples:
      mtkit tasks
      mtkit tasks copy
    """
    from mtkit.data.builtin.registry import describe, table

    typer.echo(table() if name is None else describe(name))
