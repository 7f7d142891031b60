"""The tokenizers of prepared data: trained on a sample of its text, or taken over."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mtkit.data.borrowed import copy_tokenizers
from mtkit.data.progress import ProgressBar
from mtkit.data.readers import read_corpus
from mtkit.data.tokenizer import Folding, Tokenizers, train_tokenizer
from mtkit.recipe.data import Corpus, DataSettings

_TOKENIZER_BYTES = 1 << 26
"""Text that a sentencepiece model is trained on, at most: of a larger corpus every n-th pair, the same each time."""


def train_tokenizers(
    settings: DataSettings, corpora: Sequence[Corpus], size: int, folder: Path, progress: ProgressBar
) -> Tokenizers:
    """The tokenizers of training corpora with `size` bytes of text, or those that are taken over."""
    folder.mkdir()
    if settings.tokenizer_from is not None:
        copy_tokenizers(settings.tokenizer_from / "tokenizer", folder)
        return Tokenizers.load(folder)
    several = len(settings.directions) > 1
    languages = list(dict.fromkeys(each.partition("-")[2] for each in settings.directions)) if several else []
    rule = settings.tokenizer.normalization
    folding = None if rule == "identity" else Folding(rule)
    if folding is not None:
        (folder / "folding.model").write_bytes(folding.model)
    with TemporaryDirectory(dir=folder.parent) as place:
        source, target = _write_sample(corpora, -(-size // _TOKENIZER_BYTES), folding, Path(place), progress)
        trained = {"joint": [source, target]} if settings.tokenizer.joint else {"source": [source], "target": [target]}
        for name, sides in trained.items():
            for _ in progress([name], f"training the {name} tokenizer", None):
                train_tokenizer(folder / f"{name}.model", _Lines(sides), settings.tokenizer, languages)
    return Tokenizers.load(folder)


def _write_sample(
    corpora: Sequence[Corpus], every: int, folding: Folding | None, folder: Path, progress: ProgressBar
) -> tuple[Path, Path]:
    """Write both sides of every so many pairs, the source folded.

    Tokenizers go over their text several times, a stream comes once.
    """
    paths = folder / "source", folder / "target"
    pairs = (pair for corpus in corpora for pair in read_corpus(corpus))
    with paths[0].open("wb") as source, paths[1].open("wb") as target:
        for number, pair in enumerate(progress(pairs, "reading for the tokenizer", None)):
            if number % max(every, 1) == 0:
                source.write((pair.source if folding is None else folding(pair.source)).encode() + b"\n")
                target.write(pair.target.encode() + b"\n")
    return paths


@dataclass(frozen=True)
class _Lines:
    """The lines of text files, one file after the other, as often as they are asked for."""

    paths: Sequence[Path]

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line.removesuffix("\n")
