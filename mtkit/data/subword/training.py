"""The tokenizers of prepared data: trained on a sample of its text, or taken over."""

from pathlib import Path

from mtkit.data.borrowed import copy_tokenizers
from mtkit.data.progress import ProgressBar
from mtkit.data.subword.folding import Folding
from mtkit.data.subword.sample import SOURCE, TARGET, TextSample
from mtkit.data.tokenizer import train_tokenizer
from mtkit.recipe.data import DataSettings


def make_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """Write the tokenizers of the training text that `sample` is of, or those that are taken over, to a new folder."""
    folder.mkdir()
    if settings.tokenizer_from is not None:
        copy_tokenizers(settings.tokenizer_from / "tokenizer", folder)
        return
    several = len(settings.directions) > 1
    languages = list(dict.fromkeys(each.partition("-")[2] for each in settings.directions)) if several else []
    rule = settings.tokenizer.normalization
    folding = None if rule == "identity" else Folding(rule)
    if folding is not None:
        (folder / "folding.model").write_bytes(folding.model)
        sample.fold(folding.lines)
    trained = {"joint": (SOURCE, TARGET)} if settings.tokenizer.joint else {"source": (SOURCE,), "target": (TARGET,)}
    for name, sides in trained.items():
        for _ in progress([name], f"training the {name} tokenizer", None):
            train_tokenizer(folder / f"{name}.model", sample.lines(*sides), settings.tokenizer, languages)
