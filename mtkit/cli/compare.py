"""`mtkit compare`: train several mechanisms with one recipe, budget and seed, and compare them in a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli.options import (
    AttentionOptions,
    BatchTokens,
    Device,
    PreparedData,
    RecipeFile,
    Threads,
    nonempty,
    parse_names,
    parse_options,
)
from mtkit.cli.progress import latest

if TYPE_CHECKING:
    from mtkit.experiments.folder import Folder


def compare(
    attention: Annotated[
        str, typer.Option(metavar="A,B", help="Mechanisms, each in the roles of its paper; all: every one.")
    ],
    recipe: RecipeFile = None,
    data: PreparedData = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder for table, picture and runs.")] = Path(
        "mtkit-compare"
    ),
    attention_option: AttentionOptions = None,
    max_updates: Annotated[int | None, typer.Option(help="Updates per mechanism.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Training minutes per mechanism.")] = None,
    batch_tokens: BatchTokens = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train several mechanisms under one budget and compare them.

    Recipe, budget and seed are the same for all; each model translates the first test side. The table holds BLEU with
    its 95% bootstrap interval, target tokens/s in training (without validation) and in decoding, peak memory of the
    process, parameters and updates. By default, the recipe or preset sets the budget. The same command resumes; more
    names add rows. If a mechanism fails, its row has the reason and the exit code is 1.

    \b
    Examples:
      mtkit compare --attention full,longformer,em-routing --max-minutes 2
    """
    from mtkit.recipe import load_recipe

    options = parse_options(attention_option)
    limits = nonempty(max_updates=max_updates, max_minutes=max_minutes, batch_tokens=batch_tokens)
    overrides = nonempty(seed=seed, attention=nonempty(options=options), training=limits, data=nonempty(folder=data))
    settings = load_recipe(recipe, overrides)

    import torch
    from tqdm import tqdm

    from mtkit.data.prepared import open_prepared
    from mtkit.device import find_device
    from mtkit.experiments.compare import compare as run
    from mtkit.experiments.entries import entries
    from mtkit.experiments.folder import Folder
    from mtkit.experiments.report import table

    chosen = entries(settings, parse_names("--attention", attention), options)
    prepared = open_prepared(settings.data.folder)
    chosen = {name: entry.tied(joint=prepared.tokenizers.joint) for name, entry in chosen.items()}
    folder = Folder(out)
    folder.open(chosen, prepared, device=str(find_device(device)), threads=threads or torch.get_num_threads())
    with latest() as show:

        def done(name: str) -> None:
            _write(folder)
            result = folder.result(name) or {}
            if "failed" in result:
                tqdm.write(f"{name}: failed: {result['failed']}; see {folder.log(name)}")
            else:
                bleu, updates = result["bleu"]["value"], result["training"]["updates"]
                tqdm.write(f"{name}: BLEU {bleu:.2f} after {updates:,} updates")

        signal = run(folder, list(chosen), show=show, done=done)
    written = _write(folder)
    if signal is not None:
        typer.echo("stopped; the same command resumes", err=True)
        raise typer.Exit(128 + signal)
    results = folder.results()
    typer.echo(f"\n{table(folder.settings(), results)}\n\n{written}; logs in {folder.logs}")
    if any("failed" in result for result in results if result["attention"] in chosen):
        raise typer.Exit(1)


def _write(folder: "Folder") -> str:
    """Write table, JSON and pictures of the results so far. Return the names of the files, as text for users."""
    from mtkit.experiments.plots import draw_comparison, draw_scatter
    from mtkit.experiments.report import as_object, markdown
    from mtkit.storage.files import write_json, write_text

    settings, results = folder.settings(), folder.results()
    text, data, picture, speed = folder.outputs()
    write_text(text, markdown(settings, results))
    write_json(data, as_object(settings, results))
    try:
        draw_comparison(results, picture)
        draw_scatter(results, speed)
    except ModuleNotFoundError:
        return f"{text}, {data} (no pictures: matplotlib is not installed)"
    return f"{text}, {data}, {picture}, {speed}"
