"""Writes a run as a CTranslate2 model folder, with its sentencepiece models."""

from pathlib import Path

from mtkit.decoding.engines.ctranslate2.conversion import not_held
from mtkit.errors import MtkitError
from mtkit.interchange.huggingface import CTRANSLATE2 as MARKS
from mtkit.interchange.huggingface import models, spelled
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.runs import Run


def check(recipe: Recipe) -> None:
    """Raises: MtkitError if the format does not support a part of the model, or if the library is not installed."""
    from importlib.util import find_spec

    part = not_held(recipe)
    if part is not None:
        raise MtkitError(f"CTranslate2's format has no {part}")
    if find_spec("ctranslate2") is None:
        raise MtkitError("the package ctranslate2 writes its format: pip install 'mtkit[ctranslate2]'")


def write(run: Run, model: Network, folder: Path) -> None:
    """Write the files of a model that `check` accepts into an existing folder."""
    from mtkit.decoding.engines.ctranslate2.conversion import convert

    made = folder / "converted"
    tokenizers = run.tokenizers
    convert(model, made, (spelled(tokenizers.source, MARKS), spelled(tokenizers.target, MARKS)))
    for file in made.iterdir():
        file.rename(folder / file.name)
    made.rmdir()
    for name, content in models(run).items():
        (folder / name).write_bytes(content)
