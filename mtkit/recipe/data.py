"""The recipe's data settings: where the text comes from, and how it becomes pieces."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from mtkit.recipe.settings import PositiveFloat, PositiveInt, Seed, Settings


class Corpus(Settings):
    """Segment pairs from one place: two text files, one file with both sides, or a data set."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # a column's number is written as one in YAML

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
        if self.dataset is None:
            for name in ("subset", "split", "streaming"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"a corpus's {name} is about a dataset, and this corpus is none; leave it out")
        return self


class Grammar(Settings):
    """The built-in corpus: a synchronous English-German grammar, drawn from a seed."""

    seed: Seed = 1
    """Seed of the draw."""
    train: PositiveInt = 20_000
    """Segments to train on."""
    valid: PositiveInt = 500
    """Segments to validate on."""
    test: PositiveInt = 500
    """Held-out segments; none of their sources is in training."""
    sentences: int = Field(default=1, gt=0, le=1_000)
    """Sentences a segment: above 1, segments are documents whose pronouns refer back across sentences."""


class TokenizerSettings(Settings):
    """The sentencepiece model, trained on the training text."""

    kind: Literal["bpe", "unigram"] = "bpe"
    """The segmentation algorithm."""
    joint: bool = True
    """One vocabulary for both languages; needed to tie source and target embeddings."""
    vocabulary: int = Field(default=8_000, gt=0, le=1_000_000)
    """Pieces at most; lowered to what a small corpus supports, and rounded to a multiple of 8."""
    normalization: Literal["nfkc", "nmt_nfkc", "identity"] = "nfkc"
    """How source text is folded before it is cut into pieces (sentencepiece's rule of that name). Target text stays as
    it is: what was folded away, a model could not write."""
    byte_fallback: bool = True
    """Write characters outside the vocabulary as bytes, so that nothing becomes unknown."""


class DocumentSettings(Settings):
    """Training on documents: neighbouring segments joined with a break piece between them, others each epoch."""

    pieces: PositiveInt = 250
    """Pieces a side that joined segments may have at most, and have where a document is translated; in training, rows
    of all lengths up to it are drawn, single segments among them. A longer segment stays alone."""


class Cleaning(Settings):
    """What is left out of training besides pairs with an empty side; all of it is counted either way.

    Validation and test sides are never cleaned. The defaults leave out, and refuse, only what a score would be wrong
    with.
    """

    overlap: bool = True
    """Leave out pairs that are in the validation or a test side: scores would measure memory."""
    duplicates: bool = False
    """Leave out a pair that came before; kept by default, as how often a pair occurs is part of the text."""
    identical: bool = False
    """Leave out pairs whose sides are the same; kept by default, as names and code stay as they are."""
    length_ratio: PositiveFloat | None = None
    """Leave out pairs with more than so many times the pieces on one side as on the other, where that side has over
    10; counted beyond 4 if left out."""
    misaligned: bool = False
    """Take a corpus, of any side, whose lines seem from some line on to go with their neighbour's translation; an error
    that names the line otherwise."""
    max_pieces: PositiveInt | None = None
    """Leave out pairs with more pieces than this on a side; if left out, training leaves out what the model cannot
    take (model.max_length)."""


def _listed(given: Any) -> Any:
    """One corpus stands for a list of it."""
    return given if isinstance(given, list | tuple) else [given]


def _named(given: Any) -> Any:
    """Test sides without a name are the side `test`."""
    if isinstance(given, Mapping) and all(isinstance(each, Mapping | list | tuple | Corpus) for each in given.values()):
        return given
    return {"test": given}


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_listed)]
SideName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


BESIDE = (".source", ".reference", ".direction", ".nbest")
"""What follows a side's name in the names of the files that lie beside its translations."""


class DataSettings(Settings):
    """Where the text comes from; the built-in corpus where no training text is given."""

    folder: Path = Path("mtkit-data")
    """Where the prepared data lies."""
    train: Corpora = ()
    """One corpus, or a list of them, to train on."""
    valid: Corpora = ()
    """What training validates on, likewise."""
    test: Annotated[dict[SideName, Corpora], BeforeValidator(_named)] = Field(default_factory=dict)
    """Test sides by name, each one corpus or a list; a corpus without a name is the side `test`."""
    source_language: str = "en"
    target_language: str = "de"
    builtin: Grammar = Grammar()
    tokenizer: TokenizerSettings = TokenizerSettings()
    documents: DocumentSettings | None = None
    """Join the training segments of a document; needs a corpus with `documents`."""
    cleaning: Cleaning = Cleaning()

    @property
    def directions(self) -> list[str]:
        """Translation directions of the training corpora, as `en-de`, each once, in the order they come in."""
        return list(dict.fromkeys(self.direction_of(corpus) for corpus in self.train)) or [self._direction]

    def direction_of(self, corpus: Corpus) -> str:
        """The direction of a corpus, the recipe's where it names none."""
        return corpus.direction or self._direction

    @property
    def _direction(self) -> str:
        return f"{self.source_language}-{self.target_language}"

    @model_validator(mode="after")
    def _training_text_comes_with_validation_text(self) -> Self:
        if not self.train and (self.valid or self.test):
            raise ValueError(
                "data.valid and data.test need training text beside them: give --train SRC TGT (data.train in a recipe)"
            )
        if self.train and not self.valid:
            raise ValueError(
                "training text needs validation text beside it, some hundred other lines: give --valid SRC TGT "
                "(data.valid in a recipe)"
            )
        if taken := {"train", "valid"} & set(self.test):
            raise ValueError(f"a test side cannot be named {taken.pop()}; choose another name in data.test")
        if taken := {name for name in self.test if Path(name).suffix in BESIDE}:
            raise ValueError(
                f"a test side cannot be named {taken.pop()}, as a file beside the translations of a side might be; "
                "choose another name in data.test"
            )
        return self

    @model_validator(mode="after")
    def _held_out_directions_are_trained(self) -> Self:
        known = self.directions
        for name, corpora in (("valid", self.valid), *self.test.items()):
            for corpus in corpora:
                if corpus.weight != 1:
                    raise ValueError(f"the {name} side has a weight, which is for training corpora; leave it out")
                if (direction := self.direction_of(corpus)) not in known:
                    raise ValueError(
                        f"the {name} side has the direction {direction}, which is not among the training corpora's "
                        f"({', '.join(known)}); give each corpus its `direction`"
                    )
        if len(known) > 1 and (odd := [each for each in known if each.count("-") != 1]):
            raise ValueError(f"direction {odd[0]}: write a direction as en-de, with no other hyphen in the languages")
        return self

    @model_validator(mode="after")
    def _documents_need_boundaries(self) -> Self:
        if self.documents is not None and not any(corpus.documents is not None for corpus in self.train):
            raise ValueError("data.documents needs a training corpus that says where documents end (its `documents`)")
        return self
