"""`mtkit train`: train a model, or resume its training."""

import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer import Option

from mtkit.cli.options import (
    Accumulate,
    BatchTokens,
    Device,
    PreparedData,
    Preset,
    RecipeFile,
    Threads,
    nonempty,
    note_preset,
    parse_options,
    use_threads,
)
from mtkit.cli.progress import through


def train(
    recipe: RecipeFile = None,
    data: PreparedData = None,
    name: Annotated[
        str | None,
        Option(help="Name of the run: its folder in mtkit-runs.  [default: by its attentions, e.g. full or rnn-full]"),
    ] = None,
    preset: Preset = None,
    model: Annotated[
        str | None, Option(help="Architecture: transformer, or rnn (recurrent).  [default: transformer]")
    ] = None,
    attention: Annotated[
        str | None,
        Option(
            help="Mechanism, in the roles of its paper, or several in the heads of each layer: full:2+band:2.  "
            "[default: full; additive in the rnn]"
        ),
    ] = None,
    encoder_attention: Annotated[
        str | None, Option(help="Encoder self-attention: one name, or one per layer, e.g. full,band.")
    ] = None,
    decoder_attention: Annotated[str | None, Option(help="Decoder self-attention: one name, or one per layer.")] = None,
    cross_attention: Annotated[str | None, Option(help="Attention to the source: one name, or one per layer.")] = None,
    attention_option: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE",
            help="Option of the mechanism in all roles or one: window_radius=64, decoder.window_radius=64; of one "
            "mechanism in full:2+band:2: band.window_radius=64.",
        ),
    ] = None,
    reversible: Annotated[
        bool, Option("--reversible", help="Reversible layers: activation memory does not grow with depth.")
    ] = False,
    init_from: Annotated[
        str | None,
        Option(metavar="RUN", help="Begin with the best weights and the model of this run (name or folder)."),
    ] = None,
    max_updates: Annotated[int | None, Option(help="Stop after this many updates.")] = None,
    max_epochs: Annotated[int | None, Option(help="Stop after this many epochs.")] = None,
    max_tokens: Annotated[
        int | None, Option(help="Stop after this many target tokens, or earlier at another limit.")
    ] = None,
    max_flops: Annotated[
        float | None, Option(help="Stop after this many training FLOPs, e.g. 1e15, or earlier at another limit.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        Option(help="Stop after this many minutes, or earlier at the update limit of the preset or recipe."),
    ] = None,
    batch_tokens: BatchTokens = None,
    accumulate: Accumulate = None,
    peak_rate: Annotated[float | None, Option(help="Peak learning rate.")] = None,
    tokenize: Annotated[
        str | None, Option(help="sacrebleu tokenizer for validation BLEU.  [default: by target language]")
    ] = None,
    seed: Annotated[int | None, Option(help="Random seed.")] = None,
    precision: Annotated[
        str | None,
        Option(help="Precision: auto (the fastest here), float32, tf32 (GPUs), bfloat16 or float16.  [default: auto]"),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print sizes, memory and estimated minutes of a new run, and write nothing.")
    ] = False,
) -> None:
    """Train a model on prepared data, or resume its training.

    The same command resumes an interrupted run. Ctrl-C and SIGTERM save a checkpoint. For several GPUs, start one
    process per GPU with torchrun.

    \b
    Examples:
      mtkit train --attention longformer
      mtkit train --attention full:2+band:2 --attention-option band.window_radius=16
      mtkit train --preset small --max-minutes 10
      mtkit train --preset base --dry-run
      mtkit train --model rnn
      torchrun --nproc-per-node 8 -m mtkit train --preset base
    """
    from mtkit.recipe import load_recipe
    from mtkit.runs import initial_run, named_run, resumable_folder, run_folder

    settings = load_recipe(
        recipe,
        nonempty(
            preset=preset,
            seed=seed,
            data=nonempty(folder=data),
            model=nonempty(architecture=model, reversible=reversible or None),
            attention=_attention(
                attention,
                parse_options(attention_option),
                encoder=_layers(encoder_attention),
                decoder=_layers(decoder_attention),
                cross=_layers(cross_attention),
            ),
            training=nonempty(
                init_from=init_from,
                max_updates=max_updates,
                max_epochs=max_epochs,
                max_tokens=max_tokens,
                max_flops=max_flops,
                max_minutes=max_minutes,
                batch_tokens=batch_tokens,
                accumulate=accumulate,
                peak_rate=peak_rate,
                precision=precision,
            ),
            scoring=nonempty(tokenize=tokenize),
        ),
        resumable_folder(name),
    )

    from mtkit.data.place import changed_settings
    from mtkit.data.prepared import open_prepared
    from mtkit.model.build import label_attention
    from mtkit.training.metrics import ignoring_write_errors
    from mtkit.training.train import train as run_training

    first = os.environ.get("RANK", "0") == "0"  # only one process of torchrun prints
    if first:
        note_preset(preset, recipe)
    label = label_attention(settings)  # checks names, roles and options before any data is read
    folder = run_folder(label if name is None else name)
    use_threads(threads)
    initial = settings.training.init_from
    # a dry run begins again, also if the run has begun
    source = named_run(initial) if dry_run and initial is not None else initial_run(initial, folder)
    prepared = open_prepared(settings.data.folder)
    changed = [] if recipe is None or data is not None else changed_settings(prepared.settings, settings.data)
    if changed and first:
        ignoring_write_errors(typer.echo)(
            f"note: {prepared.folder} was prepared with other settings than {recipe} has "
            f"({'; '.join(changed[:3])}) and is not changed; to replace it: "
            f"mtkit prepare --recipe {shlex.quote(str(recipe))} --overwrite"
        )
    with ExitStack() as stack:
        if dry_run:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="mtkit-dry-run-"))) / folder.name
        outcome = run_training(
            settings,
            prepared,
            folder,
            command=["mtkit", *sys.argv[1:]],
            device=device,
            init_from=source,
            say=typer.echo,
            progress=through,
            preview=dry_run,
        )
    if dry_run and first:
        ignoring_write_errors(typer.echo)("dry run: nothing was written")
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


def _attention(name: str | None, options: dict[str, Any], **roles: str | list[str] | None) -> dict[str, Any]:
    """Return the settings of `attention`. With a name, roles without an option are None: it replaces the recipe's."""
    return nonempty(name=name, options=options) | (nonempty(**roles) if name is None else roles)


def _layers(text: str | None) -> str | list[str] | None:
    """Parse a role's option: "full, band" is ["full", "band"]; a single name stays a string."""
    return [name.strip() for name in text.split(",")] if text and "," in text else text
