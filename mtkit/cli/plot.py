"""`mtkit plot`: draw attention, output distributions, position encodings, and what heads have learned."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mtkit.cli.align import NO_FONT, attend
from mtkit.cli.options import (
    Checkpoint,
    Device,
    Direction,
    RunFolder,
    RunName,
    Threads,
    Translation,
    nonempty,
    note_preset,
    output_path,
    use_threads,
)
from mtkit.cli.progress import note, steps
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.output_steps import Step

plot = typer.Typer(invoke_without_command=True)


@plot.callback()
def _plot(context: typer.Context) -> None:
    """Draw attention, outputs, positions and learned heads.

    \b
    Examples:
      mtkit plot attention --source "The boy sleeps."
      mtkit plot learned
      mtkit plot output --source "The boy sleeps."
      mtkit plot positions
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@plot.command()
def attention(
    source: Annotated[str, Option(metavar="TEXT", help="Source text: one line.")],
    target: Translation = None,
    name: RunName = None,
    run: RunFolder = None,
    direction: Direction = None,
    checkpoint: Checkpoint = "best",
    output: Annotated[Path | None, Option(metavar="FILE", help="Picture (PNG).  [default: attention.png]")] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw the attention of every layer and head.

    Each row of maps is a layer: first of the attention to the source, then of the encoder, then of the decoder. A map
    has the pieces attended to across, and the pieces that attend down. Layers whose mechanism has no weights are left
    out.

    \b
    Examples:
      mtkit plot attention --source "The boy sleeps."
      mtkit plot attention --name rnn --source "The boy sleeps." --target "Der Junge schläft." --output map.png
    """
    check_matplotlib()
    from mtkit.attention.contract import ROLES
    from mtkit.evaluation.pictures.attention import draw_attention

    output = output_path(output, "attention.png")
    use_threads(threads)
    alignment = attend(source, target, run, name, direction, checkpoint, device, ROLES)
    has_fonts = draw_attention(alignment, output)
    typer.echo(f"{output}" + ("" if has_fonts else NO_FONT))


@plot.command()
def output(
    source: Annotated[str, Option(metavar="TEXT", help="Source text: one line.")],
    target: Translation = None,
    top: Annotated[int, Option(min=1, max=50, help="Likeliest pieces per step.")] = 5,
    name: RunName = None,
    run: RunFolder = None,
    direction: Direction = None,
    checkpoint: Checkpoint = "best",
    file: Annotated[
        Path | None, Option("--output", metavar="FILE", help="Picture (PNG).  [default: output.png]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON with unrounded numbers.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw the output distribution of each step.

    A step predicts one piece of the translation from the source and the pieces before it. A table shows the
    probability and rank of the piece, the entropy of the distribution in nats, and the likeliest pieces.

    \b
    Examples:
      mtkit plot output --source "The boy sleeps."
      mtkit plot output --source "The boy sleeps." --target "Der Junge schläft." --top 10
    """
    picture = _picture(file, "output.png", as_json=as_json)

    from dataclasses import asdict

    from mtkit.decoding.alignment import SHOWN
    from mtkit.decoding.translator import Translator
    from mtkit.evaluation.pictures.outputs import draw_steps
    from mtkit.runs import find_run
    from mtkit.storage.files import json_text

    use_threads(threads)
    translator = Translator([find_run(run, name)], checkpoint=checkpoint, device=device, engine="mtkit")
    predicted = translator.output_steps(source, target, top=top, direction=direction)
    if picture is None:
        typer.echo(json_text([asdict(step) for step in predicted], indent=2, ensure_ascii=False))
        return
    if len(predicted) > SHOWN:
        note(f"only the first {SHOWN} of {len(predicted):,} target pieces are shown")
    typer.echo(_steps_table(predicted[:SHOWN]))
    has_fonts = draw_steps(predicted[:SHOWN], picture)
    typer.echo(f"\n{picture}" + ("" if has_fonts else NO_FONT))


def _steps_table(predicted: "Sequence[Step]") -> str:
    """Return a line for each step."""
    from mtkit.terminal import aligned

    rows = [("piece", "probability", "rank", "entropy", "likeliest pieces")]
    for step in predicted:
        likeliest = "  ".join(f"{name} {value:.2f}" for name, value in step.top)
        rows.append((step.piece, f"{step.probability:.3f}", str(step.rank), f"{step.entropy:.2f}", likeliest))
    return aligned(rows, left=(0, 4))


@plot.command()
def learned(
    name: RunName = None,
    run: RunFolder = None,
    data: Annotated[
        Path | None, Option(metavar="FOLDER", help="Prepared data with the validation side.  [default: the run's]")
    ] = None,
    checkpoint: Checkpoint = "best",
    segments: Annotated[
        int, Option(min=0, help="Validation segments to measure on, drawn by --seed; 0: only parameters.")
    ] = 200,
    seed: Annotated[int, Option(min=0, help="Seed of the sample.")] = 1,
    costs: Annotated[
        bool, Option("--costs/--no-costs", help="Switch each head off, one pass over the sample per head.")
    ] = True,
    output: Annotated[Path | None, Option(metavar="FILE", help="Picture (PNG).  [default: learned.png]")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON with unrounded numbers.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw what each head has learned.

    The picture and a table show for each head: its cost (the loss on a sample of the validation side with the head
    switched off, minus the loss); entropy and mean distance of its attention weights, if its mechanism has weights; and
    what its mechanism learns, such as spans, window widths, gates, mixing matrices and biases by distance.

    \b
    Examples:
      mtkit plot learned
      mtkit plot learned --name one --segments 1000 --output heads.png
      mtkit plot learned --segments 0 --json
    """
    picture = _picture(output, "learned.png", as_json=as_json)

    from mtkit.device import find_device
    from mtkit.evaluation.heads import examine, validation_side
    from mtkit.evaluation.heads_report import draw_heads, heads_table
    from mtkit.runs import find_run
    from mtkit.storage.files import json_text

    use_threads(threads)
    chosen = find_run(run, name)
    folder = chosen.checkpoint(checkpoint)
    model = chosen.load_model(folder.name, str(find_device(device)))
    side = validation_side(chosen, data) if segments else None
    with steps("heads", "pass") as on_progress:
        heads = examine(model, side, segments=segments, seed=seed, costs=costs, on_progress=on_progress)
    about = {"run": str(chosen.folder), "checkpoint": folder.name, "seed": seed}
    if picture is None:
        typer.echo(json_text({**about, **heads.as_object()}, indent=2, ensure_ascii=False))
        return
    sample = "" if heads.loss is None else f", {heads.segments:,} validation segments, loss {heads.loss:.3f}"
    typer.echo(heads_table(heads))  # which took long to measure
    has_fonts = draw_heads(heads, f"{chosen.folder.name}, {folder.name}{sample}", picture)
    typer.echo(f"\n{picture}" + ("" if has_fonts else NO_FONT))


@plot.command()
def positions(
    name: RunName = None,
    run: RunFolder = None,
    checkpoint: Checkpoint = "best",
    preset: Annotated[
        str | None, Option(help="Draw an untrained model of this size instead: tiny, small, base or big.")
    ] = None,
    recipe: Annotated[
        Path | None, Option(help="Draw an untrained model of this recipe instead: a file or a name.")
    ] = None,
    count: Annotated[int, Option("--positions", min=2, max=100_000, help="Positions, from the first.")] = 100,
    dimension: Annotated[
        list[int] | None, Option(min=0, help="Dimension drawn as a line, from 0; repeatable.  [default: four of them]")
    ] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="Picture (PNG).  [default: positions.png]")] = None,
) -> None:
    """Draw the position encodings of a run, or of an untrained model.

    Each encoding has lines of some dimensions over positions (left) and a heat map of all dimensions (right): absolute
    positions, sinusoidal or learned, and the relative positions of attention (rotary, ALiBi, Shaw's). `mtkit plot
    learned` shows what other mechanisms learn by distance.

    \b
    Examples:
      mtkit plot positions
      mtkit plot positions --preset base --dimension 4 --dimension 5 --dimension 6
    """
    check_matplotlib()

    from mtkit.evaluation.positions import draw_positions, encodings_of
    from mtkit.model.build import build_model
    from mtkit.recipe import load_recipe
    from mtkit.runs import find_run

    output = output_path(output, "positions.png")
    if preset is None and recipe is None:
        model = find_run(run, name).load_model(checkpoint)
    elif run is not None or name is not None or checkpoint != "best":
        raise MtkitError(
            "--preset and --recipe draw an untrained model; leave them out, or --name, --run and --checkpoint"
        )
    else:
        settings = load_recipe(recipe, nonempty(preset=preset))
        note_preset(preset, recipe)
        settings = settings.tied(joint=settings.data.tokenizer.joint)
        model = build_model(settings, source_vocabulary=8, target_vocabulary=8, tasks=1)
    encodings = encodings_of(model, count)
    draw_positions(encodings, output, dimension or ())
    typer.echo("\n".join([*(encoding.name for encoding in encodings), "", str(output)]))


def _picture(path: Path | None, default: str, *, as_json: bool) -> Path | None:
    """Return the file of a picture; None with --json, which draws none.

    Raises: MtkitError for both, and as `output_path` and `check_matplotlib`.
    """
    if as_json:
        if path is not None:
            raise MtkitError("--output is for the picture, and --json prints numbers instead; leave one of them out")
        return None
    check_matplotlib()
    return output_path(path, default)


def check_matplotlib() -> None:
    """Raises: MtkitError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MtkitError("pictures need matplotlib; install it: pip install 'mtkit[plots]'") from error
