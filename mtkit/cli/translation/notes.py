"""What a command says on standard error beside its work."""

import typer


def note(message: str) -> None:
    """Say something on standard error."""
    typer.echo(f"note: {message}", err=True)
