"""`mtkit studies`: list and show the studies that come with mtkit."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from mtkit.cli.options import echo_schema

studies = typer.Typer(invoke_without_command=True)


@studies.callback()
def _studies(context: typer.Context) -> None:
    """List the studies, show one, or print their schema.

    A study is a YAML file that describes a comparison: entries, tasks, seeds, search and budget. The list shows what
    each study took. `mtkit compare --study NAME` runs one.

    \b
    Examples:
      mtkit studies
      mtkit studies show probes > mine.yaml
      mtkit compare --study mine.yaml --output mine
    """
    if context.invoked_subcommand is not None:
        return
    from mtkit.recipe.file import STUDIES, read_head, shipped
    from mtkit.terminal import aligned, stdout_width

    heads = [read_head(path) for path in shipped(STUDIES).values()]
    rows = [("name", "what it compares", "took"), *((head.name, head.what, head.reached or "") for head in heads)]
    typer.echo(aligned(rows, left=range(3), width=stdout_width()))


@studies.command()
def show(study: Annotated[Path, Argument(metavar="STUDY", help="Study: a name from `mtkit studies`.")]) -> None:
    """Print a study.

    \b
    Examples:
      mtkit studies show probes > mine.yaml
    """
    from mtkit.recipe.file import STUDIES, find_recipe, read_text

    typer.echo(read_text(find_recipe(study, STUDIES), "study"), nl=False)


@studies.command()
def schema() -> None:
    """Print the JSON schema of studies, with which editors complete and check settings.

    \b
    Examples:
      mtkit studies schema > study-schema.json    # then, as the first line of mine.yaml:
                                                  # yaml-language-server: $schema=study-schema.json
    """
    from mtkit.experiments.study import StudySettings

    echo_schema(StudySettings)
