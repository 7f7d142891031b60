"""`mtkit benchmark`: measure training, decoding, long documents and attention mechanisms on this machine."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mtkit.cli.options import (
    MOST,
    Accumulate,
    AttentionOptions,
    BatchTokens,
    Checkpoint,
    Device,
    PreparedData,
    Preset,
    RecipeFile,
    Threads,
    nonempty,
    note_preset,
    parse_entries,
    parse_names,
    parse_numbers,
    parse_options,
    use_threads,
)
from mtkit.cli.progress import note, steps, through
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mtkit.benchmark.decoding import Decoder
    from mtkit.decoding.lexicon import Lexicon

Output = Annotated[Path, Option(metavar="FOLDER", help="Output folder for table, JSON and picture.")]
OUTPUT = Path("mtkit-benchmark")

benchmark = typer.Typer(invoke_without_command=True)


@benchmark.callback()
def _benchmark(context: typer.Context) -> None:
    """Measure speed and memory on this machine.

    Each command writes a table, JSON and a picture to the folder mtkit-benchmark.

    \b
    Examples:
      mtkit benchmark train --preset small
      mtkit benchmark decode --beside ctranslate2
      mtkit benchmark attention --attention band,linear
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@benchmark.command()
def train(
    recipe: RecipeFile = None,
    data: PreparedData = None,
    preset: Preset = None,
    attention: Annotated[
        str | None, Option(metavar="A,B", help="Mechanisms, each in the roles of its paper; all: every one.")
    ] = None,
    attention_option: AttentionOptions = None,
    precision: Annotated[
        str | None,
        Option(
            metavar="P,P",
            help="Precisions, e.g. float32,bfloat16; auto: all that auto chooses from.  [default: the recipe's]",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        Option(
            metavar="A,B", help="Other programs, if installed: huggingface (MarianMTModel), joeynmt, eole, sockeye."
        ),
    ] = None,
    updates: Annotated[int, Option(min=1, max=MOST, help="Timed updates.")] = 100,
    warmup: Annotated[int, Option(min=3, max=MOST, help="Updates before the timed ones.")] = 20,
    batch_tokens: BatchTokens = None,
    accumulate: Accumulate = None,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = OUTPUT,
) -> None:
    """Measure training speed on prepared data.

    Reports target tokens/s without padding, and the share of the ceiling: the speed that the measured rate of matrix
    products allows for the model's operations. Mechanisms, precisions and programs train in turns on the same batches,
    from initial weights; nothing is saved. A case that fails is reported and left out.

    \b
    Examples:
      mtkit benchmark train --preset small --attention full,linear
      mtkit benchmark train --attention all --precision float32,bfloat16 --updates 10
    """
    from mtkit.benchmark.peers import check_peers, peer_trainers
    from mtkit.recipe import load_recipe

    options = parse_options(attention_option)
    overrides = nonempty(
        preset=preset,
        data=nonempty(folder=None if data is None else str(data)),
        attention=nonempty(options=options),
        training=nonempty(batch_tokens=batch_tokens, accumulate=accumulate),
    )
    settings = load_recipe(recipe, overrides)
    note_preset(preset, recipe)
    precisions, programs = parse_names("--precision", precision), parse_names("--beside", beside)
    mechanisms = parse_entries("--attention", attention)
    check_peers(programs, "train")

    from mtkit.benchmark.report import draw
    from mtkit.benchmark.training import Plan, measure_training, own_trainers
    from mtkit.benchmark.training_report import as_object, bars, table
    from mtkit.data.prepared import open_prepared
    from mtkit.experiments.study import make_study
    from mtkit.training.precision import fixed_workspaces
    from mtkit.training.world import World

    files = _begin(output, "train", threads)
    prepared = open_prepared(settings.data.folder)
    named: dict[str | None, Any] = {None: settings}
    if mechanisms:
        common = {"recipe": None if recipe is None else str(recipe), "settings": overrides, "entries": mechanisms}
        study = make_study(common, options=options)
        named = {entry.name: study.recipe(entry) for entry in study.entries}
    recipes = [(name, prepared.applied_to(own)) for name, own in named.items()]
    settings = recipes[0][1]
    with fixed_workspaces(settings.training.deterministic), World(device) as world:
        trainers = own_trainers(recipes, prepared, world, precisions or [settings.training.precision])
        own_precisions = dict.fromkeys(["float32", *(trainer.precision for trainer in trainers)])
        peers = peer_trainers(programs, settings, prepared, world, list(own_precisions))
        with steps("benchmark", "turn", show=world.first) as on_progress:
            plan = Plan(updates=updates, warmup=warmup)
            measured = measure_training(settings, prepared, trainers, peers, plan, world, on_progress=on_progress)
        if world.first:
            _report(files, table(measured), as_object(measured), partial(draw, [bars(measured)]))


@benchmark.command()
def decode(
    run: Annotated[
        list[Path] | None,
        Option(metavar="FOLDER", help="Run folder; several are measured in turns.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several are measured in turns."),
    ] = None,
    data: Annotated[
        Path | None, Option(metavar="FOLDER", help="Prepared data with the side.  [default: each run's]")
    ] = None,
    side: Annotated[str | None, Option(help="Side to translate.  [default: the first test side]")] = None,
    checkpoint: Checkpoint = "best",
    segments: Annotated[
        int | None, Option(min=1, max=MOST, help="Translate only the first segments.  [default: all]")
    ] = None,
    beam: Annotated[str, Option(metavar="N,N", help="Beam sizes; 1 is greedy.")] = "1,5",
    dtype: Annotated[
        str, Option(metavar="D,D", help="Arithmetics of mtkit; agreement is measured with the first.")
    ] = "float32",
    shortlist: Annotated[
        int,
        Option(
            metavar="N",
            min=0,
            max=100,
            help="Measure with this shortlist too (mtkit translate --shortlist N); 0: without only.",
        ),
    ] = 0,
    batch_tokens: Annotated[
        str | None,
        Option(metavar="N,N", help="Padded source pieces per batch, counted per hypothesis; the fastest counts."),
    ] = None,
    beside: Annotated[
        str | None,
        Option(metavar="A,B", help="Other programs, same weights: huggingface,ctranslate2,joeynmt,eole,sockeye."),
    ] = None,
    repeats: Annotated[int, Option(min=1, max=MOST, help="Translations of the side per program and beam.")] = 3,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = OUTPUT,
) -> None:
    """Measure translation speed of trained runs.

    Reports segments/s from text to text, BLEU, and the share of the ceiling: the speed that the measured rate of matrix
    products allows for the model's operations. Other programs translate with the same weights in turns, each at the
    fastest of several batch sizes; one that fails is reported and left out. The side must have the same text in all
    runs' data, prepared in any way.

    \b
    Examples:
      mtkit benchmark decode --dtype float32,bfloat16 --beside ctranslate2
      mtkit benchmark decode --name deep --name shallow --dtype int8 --shortlist 10
    """
    from mtkit.benchmark.peers import check_peers, peer_decoders
    from mtkit.recipe.settings import MOST_HYPOTHESES
    from mtkit.runs import find_runs

    programs = parse_names("--beside", beside)
    beams, sizes = parse_numbers("--beam", beam, MOST_HYPOTHESES), parse_numbers("--batch-tokens", batch_tokens)
    check_peers(programs, "decode")
    runs = list({chosen.folder.resolve(): chosen for chosen in find_runs(run, name)}.values())
    for chosen in runs:
        if len(chosen.directions) > 1:
            raise MtkitError(
                f"{chosen.folder} translates {', '.join(chosen.directions)}; decode takes runs of one direction"
            )

    from mtkit.benchmark.decoding import Candidate, common_side, first_segments, measure_decoding, own_decoders
    from mtkit.benchmark.decoding_report import as_object, bars, table
    from mtkit.benchmark.report import draw
    from mtkit.data.prepared import open_prepared
    from mtkit.decoding.lexicon import lexicon_for
    from mtkit.device import find_device

    files = _begin(output, "decode", threads)
    folders = [data or chosen.recipe.data.folder for chosen in runs]
    texts = first_segments(common_side([open_prepared(folder) for folder in dict.fromkeys(folders)], side), segments)
    where = str(find_device(device))
    candidates = []
    for chosen, folder in zip(runs, folders, strict=True):
        lexicons: list[Lexicon | None] = [None]
        if shortlist:
            lexicons.append(lexicon_for(chosen, folder, say=note, progress=through).cut(shortlist))
        model = chosen.load_model(checkpoint, where)
        decoders: list[Decoder] = [*own_decoders(chosen, model, parse_names("--dtype", dtype), sizes, lexicons)]
        decoders += peer_decoders(programs, chosen, model, lexicons, left_out=note if len(runs) > 1 else None)
        candidates.append(Candidate(chosen, model, decoders))
    with steps("benchmark", "turn") as on_progress:
        measured = measure_decoding(candidates, texts, beams, repeats=repeats, on_progress=on_progress)
    _report(files, table(measured), as_object(measured), partial(draw, bars(measured)))


@benchmark.command()
def documents(
    attention: Annotated[
        str, Option(metavar="A,B", help="Mechanisms, each in the decoder and cross roles that it can play.")
    ] = "linear",
    lengths: Annotated[str, Option(metavar="T,T", help="Pieces per side of a document.")] = "500,1000,2000",
    recipe: Annotated[
        Path | None, Option(help="Recipe with the model: a YAML file or a name from `mtkit recipes`.")
    ] = None,
    preset: Preset = None,
    attention_option: AttentionOptions = None,
    vocabulary: Annotated[int, Option(min=10, max=1_000_000, help="Vocabulary size.")] = 8000,
    documents: Annotated[int, Option(min=1, max=MOST, help="Documents decoded at once, in one batch.")] = 1,
    beam: Annotated[int, Option(min=1, max=1000, help="Beam size.")] = 5,
    dtype: Annotated[str, Option(help="Arithmetic: float32, bfloat16, float16 or int8.")] = "float32",
    repeats: Annotated[int, Option(min=1, max=MOST, help="Measurements per case; the fastest counts.")] = 1,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = OUTPUT,
) -> None:
    """Measure decoding speed by document length.

    Each mechanism runs in the decoder and in the attention to the source, and is compared with a model that has full
    attention in both. The models are untrained, and hypotheses end at the last piece only, so that all make the same
    number of steps.

    \b
    Examples:
      mtkit benchmark documents --attention linear,performer --lengths 1000,2000,4000
      mtkit benchmark documents --preset base --lengths 2000 --documents 4
      mtkit benchmark documents --preset small --lengths 20 --documents 48 --dtype int8 --threads 1
    """
    from mtkit.recipe import load_recipe

    settings = load_recipe(recipe, nonempty(preset=preset))
    note_preset(preset, recipe)

    from mtkit.benchmark.documents import DocumentSetting, as_object, bars, measure_documents, table
    from mtkit.benchmark.report import draw
    from mtkit.device import find_device

    files = _begin(output, "documents", threads)
    setting = DocumentSetting(
        recipe=settings,
        vocabulary=vocabulary,
        beam=beam,
        arithmetic=dtype,
        repeats=repeats,
        device=find_device(device),
        options=parse_options(attention_option),
        documents=documents,
    )
    names = parse_names("--attention", attention)
    with steps("benchmark", "batch") as on_progress:
        measured = measure_documents(names, parse_numbers("--lengths", lengths), setting, on_progress=on_progress)
    _report(files, table(measured), as_object(measured), partial(draw, bars(measured)))


@benchmark.command()
def attention(
    attention: Annotated[
        str | None, Option(metavar="A,B", help="Mechanisms.  [default: all of linear cost published for the role]")
    ] = None,
    lengths: Annotated[str, Option(metavar="T,T", help="Sequence lengths.")] = "512,1024,2048,4096",
    role: Annotated[str, Option(help="Role: encoder, decoder or cross.")] = "encoder",
    heads: Annotated[int, Option(min=1, max=1_000_000, help="Attention heads.")] = 8,
    width: Annotated[int, Option(min=1, max=1_000_000, help="Model width, all heads together.")] = 512,
    batch: Annotated[int, Option(min=1, max=1_000_000, help="Segments per batch.")] = 1,
    attention_option: AttentionOptions = None,
    repeats: Annotated[
        int, Option(min=1, max=MOST, help="Measurements of forward and backward; the fastest counts. Steps: one.")
    ] = 3,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = OUTPUT,
) -> None:
    """Measure time, memory and FLOPs of attention mechanisms.

    Each mechanism is compared with full on the same inputs: forward and backward at each length, and a decoding step in
    the decoder and cross roles. The complete sub-layer and the attention without projections are measured separately.
    With --threads 1 on a CPU, times are the processor's, which other programs disturb less. Cases that do not fit in
    memory are reported and skipped. The exit code is 1 if a mechanism failed.

    \b
    Examples:
      mtkit benchmark attention --attention band,linear --lengths 1024,4096,16384
    """
    from mtkit.benchmark.attention import Setting, default_names, measure_attention
    from mtkit.benchmark.attention_report import as_object, draw_benchmark, table
    from mtkit.device import find_device

    files = _begin(output, f"attention-{role}", threads)
    setting = Setting(
        role=role,
        width=width,
        heads=heads,
        batch=batch,
        repeats=repeats,
        device=find_device(device),
        options=parse_options(attention_option),
    )
    chosen = default_names(role) if attention is None else parse_names("--attention", attention)
    with steps("benchmark", "part") as on_progress:
        measured = measure_attention(chosen, parse_numbers("--lengths", lengths), setting, on_progress=on_progress)
    _report(files, table(measured), as_object(measured), partial(draw_benchmark, measured))
    if measured.failed:
        raise typer.Exit(1)


def _begin(output: Path, name: str, threads: int | None) -> list[Path]:
    """Set the number of threads, and return the files of the report.

    Prints a note if other processes slow the measurement down; no note under torchrun, which starts several.
    """
    import torch

    from mtkit.benchmark.machine import busy_note
    from mtkit.benchmark.report import outputs

    use_threads(threads)
    if "WORLD_SIZE" not in os.environ and (message := busy_note(torch.get_num_threads())):
        note(message)
    return outputs(output, name)


def _report(files: "Sequence[Path]", text: str, content: dict[str, Any], draw: "Callable[[Path], object]") -> None:
    """Print a benchmark's table, write its files, and print their paths."""
    from mtkit.benchmark.report import write

    typer.echo(text)
    typer.echo(f"\n{write(files, text, content, draw)}")
