"""`mtkit export`: write a run as a folder or file that another library loads without mtkit."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mtkit.cli.options import Checkpoint, RunFolder, RunName
from mtkit.cli.progress import note


def export(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="New folder; for argos, new file.")],
    to: Annotated[str, Option(metavar="FORMAT", help="huggingface, ctranslate2 or argos.")],
    name: RunName = None,
    run: RunFolder = None,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a run in the format of another library.

    huggingface: MarianMTModel (model.norm post) or PegasusForConditionalGeneration (model.norm pre), with
    MarianTokenizer. ctranslate2: ctranslate2.Translator, with sentencepiece models. Weights are safetensors or in
    CTranslate2's format; README.md is the model card. argos: a package that Argos Translate and LibreTranslate
    install, for runs with one direction and a joint vocabulary. If the library is installed, its tokens are compared
    with mtkit's on 50 lines. If the format does not support a part of the model, the command fails and names it.

    \b
    Examples:
      mtkit export opus-mine --to huggingface --name mine
      mtkit export mine-ct2 --to ctranslate2 --run mtkit-runs/mine
      mtkit export mine.argosmodel --to argos --name mine
    """
    from mtkit.interchange.exports import export_run
    from mtkit.runs import find_run

    exported = export_run(find_run(run, name=name), to, folder, checkpoint=checkpoint)
    note(exported.compared + ("" if exported.agreement else " (the library is not installed)"))
    if exported.caution:
        note(exported.caution)
    typer.echo(str(exported.folder))
