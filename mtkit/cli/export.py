"""`mtkit export`: a run as a folder that another library loads by itself."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.cli.progress import note


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="huggingface or ctranslate2.")],
    name: Annotated[str | None, typer.Option(help="Name of the run in mtkit-runs.  [default: the latest run]")] = None,
    run: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: best, last, average or a name.")] = "best",
) -> None:
    """Write a run in the format of another library.

    huggingface: MarianMTModel (norms behind the layers) or PegasusForConditionalGeneration (before them), with
    MarianTokenizer. ctranslate2: ctranslate2.Translator, with sentencepiece models. Weights are safetensors or
    CTranslate2's own; README.md is the model card. Tokens are compared with mtkit's on 50 lines where the library is
    installed. A run that the format does not hold is refused.

    \b
    Examples:
      mtkit export opus-mine --to huggingface --name mine
      mtkit export mine-ct2 --to ctranslate2 --run mtkit-runs/mine
    """
    from mtkit.interchange.exports import export_run
    from mtkit.runs import find_run

    made = export_run(find_run(run, name=name), to, folder, checkpoint=checkpoint)
    note(f"{made.compared} (the library is not installed)" if made.agreement is None else made.compared)
    if made.caution:
        note(made.caution)
    typer.echo(str(made.folder))
