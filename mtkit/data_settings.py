"""The recipe's data settings: where the text comes from, and how it becomes pieces."""

from pathlib import Path
from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from mtkit.settings import Settings


class TextPair(Settings):
    """Two plain text files, one segment a line, the same number of lines."""

    source: Path
    target: Path


class Corpus(Settings):
    """Segment pairs from one place: two text files, one file with both sides, or a data set."""

    source: Path | str | None = None
    """Text file of the source side, one segment a line (.gz too); with `file` or `dataset` the source's column: its
    name, as `translation.en` where it is nested, or its number from 1 in a TSV file without a header."""
    target: Path | str | None = None
    """The target side, likewise."""
    file: Path | None = None
    """One file with both sides: .tsv, .jsonl or .parquet; .tsv.gz and .jsonl.gz too."""
    dataset: str | None = None
    """A data set by its name on the Hugging Face hub, or a folder that `datasets` has saved."""
    subset: str | None = None
    """Configuration of the data set, as `de-en`."""
    split: str = "train"
    """Split of the data set."""
    streaming: bool = False
    """Read the data set from the hub as it comes, without keeping it on disk."""
    documents: Path | str | None = None
    """Where documents begin and end: `empty-lines`, a text file with the document's id for each line, or a column."""
    direction: str | None = None
    """Languages of this corpus, as `en-fr`; the recipe's source and target language if left out."""
    weight: PositiveFloat = 1.0
    """How often an epoch goes through it: 2 is twice, 0.5 a random half, another one each epoch."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.file is not None and self.dataset is not None:
            raise ValueError("a corpus has either file or dataset, not both")
        if self.source is None or self.target is None:
            what = "columns" if self.file or self.dataset else "files"
            raise ValueError(f"a corpus needs source and target: its two {what}")
        return self


class Grammar(Settings):
    """The built-in corpus: a synchronous English-German grammar, drawn from a seed."""

    seed: int = 1
    """Seed of the draw."""
    train: PositiveInt = 20_000
    """Segments to train on."""
    valid: PositiveInt = 500
    """Segments to validate on."""
    test: PositiveInt = 500
    """Held-out segments; none of their sources is in training."""
    sentences: PositiveInt = 1
    """Sentences a segment: above 1, segments are documents whose pronouns refer back across sentences."""


class TokenizerSettings(Settings):
    """The sentencepiece model, trained on the training text."""

    kind: Literal["bpe", "unigram"] = "bpe"
    """The segmentation algorithm."""
    joint: bool = True
    """One vocabulary for both languages; needed to tie source and target embeddings."""
    vocabulary: PositiveInt = 8_000
    """Pieces at most; lowered to what a small corpus supports, and rounded to a multiple of 8."""
    normalization: Literal["nfkc", "nmt_nfkc", "identity"] = "nfkc"
    """How text is normalised before it is cut into pieces (sentencepiece's rule of that name)."""
    byte_fallback: bool = True
    """Write characters outside the vocabulary as bytes, so that nothing becomes unknown."""


class DataSettings(Settings):
    """Where the text comes from; the built-in corpus where no training files are given."""

    folder: Path = Path("mtkit-data")
    """Where the prepared data lies."""
    train: TextPair | None = None
    valid: TextPair | None = None
    test: TextPair | None = None
    source_language: str = "en"
    target_language: str = "de"
    builtin: Grammar = Grammar()
    tokenizer: TokenizerSettings = TokenizerSettings()

    @model_validator(mode="after")
    def _training_text_comes_with_validation_text(self) -> Self:
        if self.train is None and (self.valid or self.test):
            raise ValueError("data.valid and data.test need data.train beside them")
        if self.train is not None and self.valid is None:
            raise ValueError("data.train needs data.valid beside it: training validates on it")
        return self
