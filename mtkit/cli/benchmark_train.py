"""`mtkit benchmark train`: how fast training is here."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli.quiet import say_if_busy
from mtkit.cli.values import MOST, parse_names, parse_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtkit.benchmark.training import OwnTrainer, Trainer
    from mtkit.data.prepared import Prepared
    from mtkit.recipe import Recipe
    from mtkit.training.world import World


def train(
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe: a YAML file or a name from `mtkit recipes`. Options override it.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of prepared data.  [default: mtkit-data]")] = None,
    preset: Annotated[str | None, typer.Option(help="Model size: tiny, small, base or big.  [default: tiny]")] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="A,B", help="Mechanisms, each in the roles of its paper; all: every one.")
    ] = None,
    attention_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of every mechanism that has it, e.g. window_radius=64."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            help="Precisions, e.g. float32,bfloat16; auto: all it chooses between here.  [default: the recipe's]",
        ),
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="Other program, if installed: huggingface (MarianMTModel).")
    ] = None,
    updates: Annotated[int, typer.Option(min=1, max=MOST, help="Timed updates.")] = 100,
    warmup: Annotated[int, typer.Option(min=3, max=MOST, help="Updates before the timed ones.")] = 20,
    batch_tokens: Annotated[int | None, typer.Option(help="Maximum padded tokens per batch.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches per update.")] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder for table, JSON and picture.")] = Path(
        "mtkit-benchmark"
    ),
) -> None:
    """Measure training speed on prepared data.

    Reports real target tokens/s, without padding, and the share of the ceiling: the speed that the measured rate of
    matrix products allows for the operations the model needs. Mechanisms, precisions and programs train on the same
    batches in turns, from initial weights; nothing is saved. One that fails is named and left out.

    \b
    Examples:
      mtkit benchmark train --preset small --attention full,linear
      mtkit benchmark train --attention all --precision float32,bfloat16 --updates 10
    """
    from mtkit.benchmark.peers import check_peers
    from mtkit.recipe import load_recipe

    options = parse_options(attention_option or [])
    given = {
        "data": {} if data is None else {"folder": data},
        "attention": {"options": options},
        "training": {
            name: value
            for name, value in (("batch_tokens", batch_tokens), ("accumulate", accumulate))
            if value is not None
        },
    }
    settings = load_recipe(recipe, given if preset is None else given | {"preset": preset})
    precisions, programs = parse_names("--precision", precision), parse_names("--beside", beside)
    mechanisms = parse_names("--attention", attention)
    check_peers(programs, ["huggingface"], "train")

    import torch

    from mtkit.benchmark.report import outputs, write
    from mtkit.benchmark.training import Plan, as_object, bars, measure_training, table
    from mtkit.cli.progress import steps
    from mtkit.data.prepared import open_prepared
    from mtkit.experiments.entries import entries
    from mtkit.training.precision import fixed_workspaces
    from mtkit.training.world import World

    if threads is not None:
        torch.set_num_threads(threads)
    say_if_busy()
    files = outputs(output, "train")
    prepared = open_prepared(settings.data.folder)
    settings = settings.model_copy(update={"data": prepared.settings}).tied(joint=prepared.tokenizers.joint)
    with fixed_workspaces(settings.training.deterministic), World(device) as world:
        chosen = list(entries(settings, mechanisms, options).values()) if mechanisms else [settings]
        own = _own(chosen, prepared, world, precisions or [settings.training.precision])
        peers = _peers(settings, prepared, world, own) if programs else []
        with steps("benchmark", "turn", show=world.first) as on_progress:
            plan = Plan(updates=updates, warmup=warmup)
            measured = measure_training(settings, prepared, own, peers, plan, world, on_progress=on_progress)
        if world.first:
            typer.echo(table(measured))
            typer.echo(f"\n{write(files, table(measured), as_object(measured), [bars(measured)])}")


def _own(
    recipes: "Sequence[Recipe]", prepared: "Prepared", world: "World", precisions: list[str]
) -> "Sequence[OwnTrainer]":
    """A trainer for each recipe in each precision. Raises: RecipeError, MtkitError."""
    from mtkit.benchmark.training import OwnTrainer
    from mtkit.recipe import make_recipe, merged
    from mtkit.training.precision import precisions as choices

    named = [choices(world.device) if each == "auto" else (each,) for each in precisions]
    return [
        OwnTrainer(make_recipe(merged(recipe.model_dump(), {"training": {"precision": precision}})), prepared, world)
        for recipe in recipes
        for precision in dict.fromkeys(chain(*named))
    ]


def _peers(recipe: "Recipe", prepared: "Prepared", world: "World", own: "Sequence[OwnTrainer]") -> "Sequence[Trainer]":
    """Hugging Face's model in float32, and in each of mtkit's precisions that it has too."""
    from mtkit.benchmark.peers.huggingface_training import PRECISIONS, HuggingFaceTrainer

    precisions = dict.fromkeys(["float32", *(each.precision for each in own if each.precision in PRECISIONS)])
    return [HuggingFaceTrainer(recipe, prepared, world, each) for each in precisions]
