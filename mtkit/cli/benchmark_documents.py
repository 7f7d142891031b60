"""`mtkit benchmark documents`: how fast long documents are decoded with each mechanism."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.cli.quiet import say_if_busy
from mtkit.cli.values import MOST, parse_names, parse_numbers, parse_options


def documents(
    attention: Annotated[
        str, typer.Option(metavar="A,B", help="Mechanisms, each in the decoder and cross roles that it can play.")
    ] = "linear",
    lengths: Annotated[str, typer.Option(metavar="T,T", help="Pieces of each side of a document.")] = "500,1000,2000",
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with the model: a YAML file or a name from `mtkit recipes`.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Model size: tiny, small, base or big.  [default: tiny]")] = None,
    attention_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of every mechanism that has it, e.g. window_radius=64."),
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=10, max=1_000_000, help="Pieces of the vocabulary.")] = 8000,
    documents: Annotated[int, typer.Option(min=1, max=MOST, help="Documents decoded at once, in one batch.")] = 1,
    beam: Annotated[int, typer.Option(min=1, max=1000, help="Beam size.")] = 5,
    dtype: Annotated[str, typer.Option(help="Arithmetic: float32, bfloat16, float16 or int8.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, max=MOST, help="Measurements per case; the fastest counts.")] = 1,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder for table, JSON and picture.")] = Path(
        "mtkit-benchmark"
    ),
) -> None:
    """Measure decoding speed over the length of a document.

    Each mechanism runs in the decoder and in the attention to the source, beside a model with full attention in both.
    The models are untrained, and hypotheses end at the last piece only, so that all make the same number of steps.

    \b
    Examples:
      mtkit benchmark documents --attention linear,performer --lengths 1000,2000,4000
      mtkit benchmark documents --preset base --lengths 2000 --documents 4
    """
    from mtkit.recipe import load_recipe

    settings = load_recipe(recipe, {} if preset is None else {"preset": preset})

    import torch

    from mtkit.benchmark.documents import DocumentSetting, as_object, bars, measure_documents, table
    from mtkit.benchmark.report import outputs, write
    from mtkit.cli.progress import steps
    from mtkit.device import find_device

    if threads is not None:
        torch.set_num_threads(threads)
    say_if_busy()
    files = outputs(output, "documents")
    setting = DocumentSetting(
        recipe=settings,
        vocabulary=vocabulary,
        beam=beam,
        arithmetic=dtype,
        repeats=repeats,
        device=find_device(device),
        options=parse_options(attention_option or []),
        documents=documents,
    )
    with steps("benchmark", "batch") as on_progress:
        measured = measure_documents(
            parse_names("--attention", attention), parse_numbers("--lengths", lengths), setting, on_progress=on_progress
        )
    typer.echo(table(measured))
    typer.echo(f"\n{write(files, table(measured), as_object(measured), bars(measured))}")
