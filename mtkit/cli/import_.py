"""`mtkit import`: a run made of a model that was trained elsewhere."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mtkit.errors import MtkitError, shown


def import_(
    model: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of a Hugging Face Marian model, or its name on the hub.")
    ],
    name: Annotated[str, typer.Option(help="Name of the run: its folder in mtkit-runs.")],
    source_language: Annotated[
        str | None, typer.Option(metavar="EN", help="Source language.  [default: as in tokenizer_config.json]")
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(metavar="DE", help="Target language.  [default: as in tokenizer_config.json]")
    ] = None,
) -> None:
    """Make a run of a Marian model (OPUS-MT and models fine-tuned from it).

    The folder has config.json, weights as safetensors, source.spm, target.spm and vocab.json. The run translates with
    the same tokens in float32, and does all that a trained run does. A pickle is refused with the line that converts
    it.

    \b
    Examples:
      mtkit import opus-mt-en-de --name opus
      mtkit import Helsinki-NLP/opus-mt-en-de --name opus
      mtkit translate --name opus --input text.en --output text.de
      mtkit prepare --tokenizer-from opus --train a.en a.de --valid b.en b.de
      mtkit train --init-from opus --attention longformer
    """
    from mtkit.interchange.imports import find_folder, import_marian
    from mtkit.recipe.settings import RUNS

    if name in ("", "..") or Path(name).name != name:
        raise MtkitError(f"--name {shown(name)}: a run's name is one folder under {RUNS}, without slashes")
    folder = find_folder(model)
    made = import_marian(
        folder,
        RUNS / name,
        source_language=source_language,
        target_language=target_language,
        named=None if folder == Path(model) else model,
        command=["mtkit", *sys.argv[1:]],
    )
    for note in made.notes:
        typer.echo(f"note: {note}")
    directions, settings = made.run.directions, made.run.recipe.model
    listed = ", ".join(directions[:5]) + ", ..." * (len(directions) > 5)
    layers = f"{settings.encoder_layers} + {settings.decoder_layers} layers of width {settings.d_model}"
    typer.echo(f"{made.run.folder}: {listed}, {layers}, {made.run.about['vocabularies']['target']:,} target pieces")
    direction = f" --direction {directions[0]}" if len(directions) > 1 else ""
    typer.echo(f"\nNext: mtkit translate --name {name}{direction} --input FILE")
