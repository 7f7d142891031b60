"""`mtkit recipes`: the recipes that come with mtkit, and whether they keep what they promise."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mtkit.recipe_check import Checked
    from mtkit.recipe_head import Head

recipes = typer.Typer(
    help="List the recipes that come with mtkit; --recipe NAME takes them by name.", invoke_without_command=True
)

Name = Annotated[str, typer.Argument(help="Name of the recipe, as `mtkit recipes` lists it.")]


@recipes.callback()
def _recipes(context: typer.Context) -> None:
    """List the recipes that come with mtkit: what each is, what it promises, and what was reached.

    Any command takes one by its name: mtkit prepare --recipe multi30k-en-de. The corpora of some are looked for in the
    folder that the environment variable MTKIT_DATA names.

    Examples: mtkit recipes; mtkit recipes show scan-simple; mtkit recipes check scan-simple
    """
    if context.invoked_subcommand is not None:
        return
    from mtkit.recipe_file import shipped_recipes
    from mtkit.recipe_head import read_head

    typer.echo(_table([read_head(path) for path in shipped_recipes().values()]))


@recipes.command()
def show(name: Name) -> None:
    """Print a recipe.

    Examples: mtkit recipes show scan-simple > mine.yaml
    """
    from mtkit.recipe_file import shipped_recipe

    typer.echo(shipped_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes.command()
def check(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where data and run go.  [default: mtkit-recipes/NAME, limits added]"),
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Train so many minutes.  [default: the recipe's]")] = None,
    max_updates: Annotated[int | None, typer.Option(help="Stop training after this many updates.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: one for each core]")] = None,
) -> None:
    """Prepare, train, translate and score by a recipe, and say whether it keeps its promises: exit code 0, else 1.

    All of it happens in a folder of its own. Killed and typed again, it goes on where it was. A promise counts for a
    training of as many minutes or more; of a training shorter than all of them, the first one does.

    Examples: mtkit recipes check scan-simple; mtkit recipes check multi30k-en-de --max-minutes 5
    """
    from mtkit.recipe_file import shipped_recipe

    path = shipped_recipe(name)

    import torch
    from tqdm import tqdm

    from mtkit.data.encode import usable_cores
    from mtkit.recipe_check import check as run_check

    if threads is not None:
        torch.set_num_threads(threads)
    limits = {"max_minutes": max_minutes, "max_updates": max_updates}
    given = {key: value for key, value in limits.items() if value is not None}
    # a folder of its own: a training that has cooled down at another limit is no beginning of this one
    place = "-".join([name, *(f"{key.removeprefix('max_')}-{value:g}" for key, value in given.items())])
    checked = run_check(
        path,
        out or Path("mtkit-recipes") / place,
        given,
        command=["mtkit", *sys.argv[1:]],
        device=device,
        workers=threads or usable_cores(),
        say=typer.echo,
        progress=lambda items, what, total: tqdm(items, what, total, delay=2, unit_scale=True, leave=False),
    )
    if checked.signal is not None:
        typer.echo("stopped; the same command goes on from there", err=True)
        raise typer.Exit(128 + checked.signal)
    _tell(checked)
    if not checked.kept:
        raise typer.Exit(1)


def _tell(checked: "Checked") -> None:
    from mtkit.evaluation.report import side_text

    for side in checked.sides:
        typer.echo(f"\n{side_text(side)}")
    typer.echo("")
    if not checked.promises:
        typer.echo(f"{checked.head.name} promises nothing yet: these are its scores")
    for promise, score in checked.promises:
        verdict = "kept" if promise.kept(score) else "not kept"
        typer.echo(f"{verdict}: {promise.text}; reached {score:.2f}")


def _table(heads: "list[Head]") -> str:
    """A line for each recipe, and one more for each promise beyond the first."""
    rows = [("name", "what it is", "promises")]
    for head in heads:
        first, *more = [promise.text for promise in head.promises] or ["nothing yet"]
        rows += [(head.name, head.what, first), *(("", "", each) for each in more)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {what:{widths[1]}}  {promise}" for name, what, promise in rows)
