"""`mtkit attentions`: list the attention mechanisms, or show one with its options."""

from typing import Annotated

import typer


def attentions(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this mechanism with its options.")] = None,
) -> None:
    """List the attention mechanisms, or show one with its options.

    The list shows family, roles, cost and paper. Roles in brackets are extensions of the paper; only options by role
    select them (`mtkit train --decoder-attention NAME`).

    \b
    Examples:
      mtkit attentions
      mtkit attentions longformer
    """
    from mtkit.attention.catalogue import describe, table

    typer.echo(table() if name is None else describe(name))
