"""`mtkit recipes`: list, show and check the recipes that come with mtkit."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from mtkit.cli.options import Device, Threads, echo_schema, nonempty, use_threads
from mtkit.cli.progress import through

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtkit.experiments.check import Checked
    from mtkit.recipe.file import Head

recipes = typer.Typer(invoke_without_command=True)

Which = Annotated[Path, Argument(metavar="RECIPE", help="Recipe: a name from `mtkit recipes` or a YAML file.")]


@recipes.callback()
def _recipes(context: typer.Context) -> None:
    """List the recipes, show one, or check its promised scores.

    The list shows each recipe with the scores it promises and the scores it reached. The other commands read a recipe
    with `--recipe NAME`. The environment variable MTKIT_DATA names the folder of their corpora.

    \b
    Examples:
      mtkit recipes
      mtkit recipes show scan-simple
      mtkit recipes check scan-simple
    """
    if context.invoked_subcommand is not None:
        return
    from mtkit.recipe.file import read_head, read_settings, shipped

    paths = shipped().values()
    typer.echo(_table([(read_head(path), read_settings(path).get("promises", [])) for path in paths]))


@recipes.command()
def show(recipe: Which) -> None:
    """Print a recipe.

    \b
    Examples:
      mtkit recipes show scan-simple > mine.yaml
    """
    from mtkit.recipe.file import find_recipe, read_text

    typer.echo(read_text(find_recipe(recipe)), nl=False)


@recipes.command()
def schema() -> None:
    """Print the JSON schema of recipes, with which editors complete and check settings.

    \b
    Examples:
      mtkit recipes schema > recipe-schema.json    # then, as the first line of mine.yaml:
                                                   # yaml-language-server: $schema=recipe-schema.json
    """
    from mtkit.recipe import Recipe

    echo_schema(Recipe)


@recipes.command()
def check(
    recipe: Which,
    output: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Output folder for data and run.  [default: mtkit-recipes/RECIPE, limits added]"),
    ] = None,
    max_minutes: Annotated[
        float | None, Option(help="Stop after this many minutes, or earlier at another limit of the recipe.")
    ] = None,
    max_updates: Annotated[int | None, Option(help="Stop training after this many updates.")] = None,
    max_tokens: Annotated[int | None, Option(help="Stop training after this many target tokens.")] = None,
    max_flops: Annotated[float | None, Option(help="Stop training after this many FLOPs, e.g. 1e15.")] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Run a recipe and check the scores that it promises.

    Prepares, trains, translates and scores in a separate folder. The exit code is 0 if all promises are kept, else 1.
    The same command resumes. A promise applies to trainings of at least its minutes; the first promise applies to
    shorter trainings.

    \b
    Examples:
      mtkit recipes check scan-simple
      mtkit recipes check multi30k-en-de --max-minutes 5
      mtkit recipes check mine.yaml
    """
    from mtkit.recipe.file import find_recipe

    path = find_recipe(recipe)

    from mtkit.data.encode import usable_cores
    from mtkit.experiments.check import check as run_check

    use_threads(threads)
    limits = nonempty(max_minutes=max_minutes, max_updates=max_updates, max_tokens=max_tokens, max_flops=max_flops)
    # each limit has its folder: a training that has cooled down at another limit cannot continue
    place = "-".join([path.stem, *(f"{key.removeprefix('max_')}-{value:.15g}" for key, value in limits.items())])
    checked = run_check(
        path,
        output or Path("mtkit-recipes") / place,
        limits,
        command=["mtkit", *sys.argv[1:]],
        device=device,
        workers=threads or usable_cores(),
        say=typer.echo,
        progress=through,
    )
    if checked.signal is not None:
        typer.echo("stopped; the same command resumes", err=True)
        raise typer.Exit(128 + checked.signal)
    _print(checked)
    if not checked.kept:
        raise typer.Exit(1)


def _print(checked: "Checked") -> None:
    from mtkit.evaluation.report import side_text

    for side in checked.sides:
        typer.echo(f"\n{side_text(side)}")
    typer.echo("")
    if not checked.promises:
        typer.echo(f"{checked.head.name} promises nothing yet; these are its scores")
    for promise, score in checked.promises:
        kept = promise.kept(score)
        rounded = [f"{score:.{digits}f}" for digits in (2, 4, 8)]  # enough digits to see whether it is kept
        reached = next((text for text in rounded if promise.kept(float(text)) == kept), str(score))
        typer.echo(f"{'kept' if kept else 'not kept'}: {promise.text}; reached {reached}")


def _table(recipes: "Sequence[tuple[Head, Sequence[str]]]") -> str:
    """Return a line for each recipe, and one more for each promise after the first."""
    from mtkit.terminal import aligned, stdout_width

    rows = [("name", "what it is", "promises", "reached")]
    for head, promises in recipes:
        first, *more = promises or ["nothing yet"]
        score = re.match(r"\w+ [\d.]+", head.reached or "")
        rows += [(head.name, head.what, first, score[0] if score else ""), *(("", "", promise, "") for promise in more)]
    return aligned(rows, left=range(4), width=stdout_width())
