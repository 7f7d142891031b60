"""`mtkit attentions`: the mechanisms there are, or one of them with its options."""

from typing import Annotated

import typer


def attentions(
    name: Annotated[str | None, typer.Argument(help="Show this mechanism with its options.")] = None,
) -> None:
    """List the attention mechanisms with family, roles, cost and paper, or show one with its options.

    Roles in brackets are extensions beyond the paper, to be asked for by role.

    Examples: mtkit attentions; mtkit attentions longformer
    """
    from mtkit.attention.catalogue import describe, table

    typer.echo(table() if name is None else describe(name))
