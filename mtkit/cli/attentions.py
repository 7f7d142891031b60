"""`mtkit attentions`: list the attention mechanisms, or show one with its options."""

from typing import Annotated

import typer
from typer import Argument, Option

from mtkit.errors import MtkitError


def attentions(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Show this mechanism with its options; years with --year.")
    ] = None,
    complexity: Annotated[
        bool, Option("--complexity", help="List cost, sequential operations and longest path instead.")
    ] = False,
    year: Annotated[
        bool, Option("--year", help="List by year of the paper; only some years: --year 2021-2026.")
    ] = False,
) -> None:
    """List the attention mechanisms, or show one with its options.

    The list shows family, roles, cost and what a mechanism is good at; with --year, the paper. Roles in brackets are
    extensions of the paper; only options by role select them (`mtkit train --decoder-attention NAME`).

    \b
    Examples:
      mtkit attentions
      mtkit attentions longformer
      mtkit attentions full:4+band:4
      mtkit attentions --year 2021-2026
      mtkit attentions --complexity
    """
    from mtkit.attention.catalogue import complexity_table, describe, table, year_table, years

    if year and complexity:
        raise MtkitError("--year and --complexity are two lists; leave one of them out")
    if year:
        typer.echo(year_table(*(() if name is None else years(name))))
        return
    if name is not None and complexity:
        raise MtkitError("--complexity lists all mechanisms; leave out the name, or --complexity")
    typer.echo(describe(name) if name is not None else complexity_table() if complexity else table())
