"""`mtkit import`: make a run of a model that another library trained."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def import_(
    model: Annotated[
        str, Argument(metavar="FOLDER", help="Folder of a Hugging Face Marian model, or its name on the hub.")
    ],
    name: Annotated[str, Option(help="Name of the run: its folder in mtkit-runs.")],
    source_language: Annotated[
        str | None, Option(metavar="EN", help="Source language.  [default: as in tokenizer_config.json]")
    ] = None,
    target_language: Annotated[
        str | None, Option(metavar="DE", help="Target language.  [default: as in tokenizer_config.json]")
    ] = None,
) -> None:
    """Import a Marian model, such as OPUS-MT, as a run.

    The folder has config.json, weights as safetensors, source.spm, target.spm and vocab.json. In float32, the run
    gives the same tokens as the model. All commands accept it like a trained run. If the weights are a pickle, the
    command fails and prints the line that converts them.

    \b
    Examples:
      mtkit import opus-mt-en-de --name opus
      mtkit import Helsinki-NLP/opus-mt-en-de --name opus
      mtkit translate --name opus --input text.en --output text.de
      mtkit prepare --tokenizer-from opus --train a.en a.de --valid b.en b.de
      mtkit train --init-from opus --attention longformer
    """
    from mtkit.interchange.imports import find_folder, import_marian
    from mtkit.runs import run_folder

    into = run_folder(name)
    folder = find_folder(model)
    imported = import_marian(
        folder,
        into,
        source_language=source_language,
        target_language=target_language,
        named=None if folder == Path(model) else model,
        command=["mtkit", *sys.argv[1:]],
    )
    for message in imported.notes:
        typer.echo(f"note: {message}")
    run = imported.run
    directions, settings = run.directions, run.recipe.model
    listed = ", ".join(directions[:5]) + ", ..." * (len(directions) > 5)
    layers = f"{settings.encoder_layers} + {settings.decoder_layers} layers of width {settings.d_model}"
    typer.echo(f"{run.folder}: {listed}, {layers}, {run.about['vocabularies']['target']:,} target pieces")
    direction = f" --direction {directions[0]}" if len(directions) > 1 else ""
    typer.echo(f"\nNext: mtkit translate --name {shlex.quote(name)}{direction} --input FILE")
