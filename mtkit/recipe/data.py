"""The recipe's data settings: corpora, built-in corpus and tasks, tokenizer, documents and cleaning."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from mtkit.errors import shown
from mtkit.recipe.settings import PositiveFloat, PositiveInt, Seed, Settings
from mtkit.recipe.task import Task

_BOTH_SIDES = (".tsv", ".csv", ".jsonl", ".tmx", ".parquet", ".xlsx")
"""Suffixes of files that hold both sides."""


class Corpus(Settings):
    """Segment pairs: two text files, one file with both sides, a data set, or a sacrebleu test set."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # a column's number is written as one in YAML

    source: Path | str | None = None
    """Text file of the source side, one segment per line (.gz too). With `file` or `dataset`, the source column: its
    name (`translation.en` if nested), its number from 1 in a TSV file without a header, or the language in a TMX file.
    """
    target: Path | str | None = None
    """Text file or column of the target side."""
    translated_by: Path | None = None
    """Run (name or folder) that translates the given side into the missing side: into the target for sequence-level
    distillation, into the source for back-translation. Only for training corpora."""
    file: Path | None = None
    """One file with both sides: .tsv, .jsonl, .tmx or .parquet; .tsv.gz, .jsonl.gz and .tmx.gz too."""
    dataset: str | None = None
    """Data set: its name on the Hugging Face hub, or a folder saved by `datasets`."""
    subset: str | None = None
    """Configuration of the data set, e.g. `de-en`."""
    split: str = "train"
    """Split of the data set."""
    sacrebleu: str | None = None
    """Name of a sacrebleu test set, e.g. wmt14, in the corpus's direction; downloaded at first use. Only for validation
    and test sides."""
    streaming: bool = False
    """Stream the data set from the hub instead of storing it on disk."""
    documents: Path | str | None = None
    """Document boundaries: `empty-lines`, a text file with one document id per line, or a column."""
    scores: Path | str | None = None
    """Scores of the pairs, higher for better ones, as bicleaner and language identification write them: a text file
    with a number per line, or a column. Only for training corpora."""
    least_score: float | None = Field(default=None, allow_inf_nan=False)
    """Leave out pairs with a lower score. Requires `scores`."""
    direction: str | None = None
    """Translation direction, e.g. `en-fr`. Default: the recipe's source and target language."""
    weight: PositiveFloat = 1.0
    """Passes over the corpus per epoch. 0.5 draws a new random half each epoch."""

    @field_validator("direction")
    @classmethod
    def _has_two_languages(cls, direction: str | None) -> str | None:
        if direction is not None and not all(direction.partition("-")):
            raise ValueError(f"write a direction as en-de, not {shown(direction)}")
        for language in (direction or "").split("-"):
            _without_slash(language)
        return direction

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.file is not None and self.dataset is not None:
            raise ValueError("a corpus has either file or dataset, not both")
        if self.sacrebleu is not None:
            others = ("source", "target", "file", "dataset", "translated_by", "documents", "scores")
            if given := [name for name in others if getattr(self, name) is not None]:
                raise ValueError(f"sacrebleu already provides the corpus's text; leave {given[0]} out")
        elif self.translated_by is not None:
            if self.file is not None or self.dataset is not None:
                raise ValueError(
                    "translated_by applies to text files; leave it out, or write the column as a text file"
                )
            if (self.source is None) == (self.target is None):
                raise ValueError(
                    "a corpus with translated_by has either source or target; the run writes the other side"
                )
        elif self.source is None or self.target is None:
            what = "columns" if self.file or self.dataset else "files"
            raise ValueError(f"a corpus needs source and target: its two {what}")
        if (self.scores is None) != (self.least_score is None):
            raise ValueError("scores and least_score of a corpus go together; give both, or neither")
        if self.dataset is None:
            for name in ("subset", "split", "streaming"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} of a corpus applies to data sets only; leave it out, or give dataset")
        return self

    @model_validator(mode="after")
    def _text_files(self) -> Self:
        name, is_text = str(self.source or ""), self.file is None and self.dataset is None
        if is_text and self.source == self.target and Path(name.removesuffix(".gz")).suffix in _BOTH_SIDES:
            raise ValueError(
                f"{name} is the file of both sides; name it once in a recipe, with its columns (of .tmx, its "
                f"languages): {{file: {name}, source: en, target: ja}}"
            )
        return self

    @property
    def label(self) -> str:
        """Label in messages: file names without folders, or the data set name."""
        if self.dataset is not None:
            return self.dataset
        files = [self.file] if self.file is not None else [self.source, self.target]
        names = " and ".join(Path(file).name for file in files if file is not None)
        return names if self.translated_by is None else f"{names}, translated by the run {self.translated_by.name}"


class Grammar(Settings):
    """The built-in corpus: segment pairs sampled from a synchronous English-German grammar."""

    seed: Seed = 1
    """Random seed."""
    train: PositiveInt = 20_000
    """Training segments."""
    valid: PositiveInt = 500
    """Validation segments."""
    test: PositiveInt = 500
    """Test segments. The training side contains no source of the validation and test sides."""
    sentences: int = Field(default=1, gt=0, le=1_000)
    """Sentences per document. Above 1, pronouns refer back across sentences, and each line holds one document."""
    fewest: PositiveInt | None = None
    """Minimum sentences of a training document; null: all have `sentences`. Otherwise most documents are short, from
    which a model learns the alignment sooner, and one in fifty has 10% more sentences than `sentences`."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.fewest is not None and self.fewest > self.sentences:
            raise ValueError(f"data.builtin.fewest = {self.fewest} exceeds data.builtin.sentences = {self.sentences}")
        return self


class TokenizerSettings(Settings):
    """The sentencepiece model, trained on the training text."""

    kind: Literal["bpe", "unigram", "words"] = "bpe"
    """The segmentation algorithm. words: each word of the training text is a piece. Default of tasks: words."""
    joint: bool = True
    """One vocabulary for both languages. `model.tie: all` needs it."""
    vocabulary: int = Field(default=8_000, gt=0, le=1_000_000)
    """Maximum vocabulary size. It is lowered to what a small corpus supports, and rounded to a multiple of 8."""
    normalization: Literal["nfkc", "nmt_nfkc", "identity"] = "nfkc"
    """Normalisation rule of sentencepiece for source text. Target text is not normalised: a model could not generate
    the characters that normalisation removes."""
    byte_fallback: bool = True
    """Encode characters outside the vocabulary as bytes, so that no piece is unknown. Default of tasks: false."""


class DocumentSettings(Settings):
    """Training on documents: neighbouring segments are joined with a break piece, into different rows each epoch."""

    pieces: PositiveInt = 250
    """Maximum pieces per side of joined segments. Translation fills rows up to this length; training draws rows of all
    lengths up to it, including single segments. A longer segment is a row by itself."""
    whole: bool = False
    """Fill training rows up to this length too: a document that fits is one row. Suits short documents."""


class Cleaning(Settings):
    """Rules that exclude pairs from training. Pairs with an empty side are always excluded.

    Matching pairs are counted even if a rule is off. Validation and test sides are never cleaned. The defaults exclude
    or refuse only data that would make scores wrong.
    """

    overlap: bool = True
    """Leave out pairs that are also in the validation or a test side: scores would measure memorisation."""
    duplicates: bool = False
    """Leave out repeated pairs. Default: keep, because the frequency of a pair is information."""
    identical: bool = False
    """Leave out pairs with identical sides. Default: keep, because names and code are not translated."""
    length_ratio: PositiveFloat | None = None
    """Maximum ratio of pieces between the longer and the shorter side. Pairs above it are left out if the longer side
    has over 10 pieces. Default: keep all, and count ratios above 4."""
    misaligned: bool = False
    """Accept corpora whose sides seem to be misaligned from some line on. Default: an error with the line number."""
    max_pieces: PositiveInt | None = None
    """Leave out pairs with more pieces than this on a side. Default: `model.max_length`."""


def _listed(corpora: Any) -> Any:
    """Return a list unchanged, and wrap a single corpus in a list."""
    return corpora if isinstance(corpora, list | tuple) else [corpora]


def _one_word(name: str) -> str:
    if len(name.split()) != 1:
        raise ValueError(f"no language '{name[:80]}': give one word: a code (zh-CN) or an English name (Japanese)")
    return _without_slash(name.strip())


def _without_slash(language: str) -> str:
    if "/" in language:
        raise ValueError(f"no language {shown(language)}: write it without '/', as zh-CN")
    return language


def _with_region(name: str) -> str:
    """Return a source language whose region has capitals: zh-CN for zh-cn, which begins a direction otherwise."""
    language, _, region = _one_word(name).partition("-")
    return f"{language}-{region.upper()}" if len(region) == 2 else _one_word(name)


def _in_lower_case(name: str) -> str:
    """Return a target language in capitals in lower case, as ko-KR for KO-KR: a direction en-KO-KR ends in KR."""
    language, hyphen, region = _one_word(name).partition("-")
    return f"{language.lower()}-{region}" if hyphen and language.isupper() else _one_word(name)


_FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def _file_name(name: str) -> str:
    if not re.fullmatch(_FILE_NAME, name):
        raise ValueError(
            f"data.test: side {shown(name)} names files; use ASCII letters, digits, '_', '.' and '-', with a letter "
            "or a digit first"
        )
    return name


def _named(sides: Any) -> Any:
    """Return test sides by name; corpora without a name become the side `test`."""
    if isinstance(sides, Mapping) and all(isinstance(side, Mapping | list | tuple | Corpus) for side in sides.values()):
        return sides
    return {"test": sides}


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_listed, json_schema_input_type=Corpus | tuple[Corpus, ...])]
TargetLanguage = Annotated[str, AfterValidator(_in_lower_case)]
SourceLanguage = Annotated[str, AfterValidator(_with_region)]
SideName = Annotated[str, AfterValidator(_file_name), WithJsonSchema({"type": "string", "pattern": _FILE_NAME})]


BESIDE = (".source", ".reference", ".direction", ".nbest")
"""Suffixes of the files that are stored next to the translations of a side."""


class DataSettings(Settings):
    """Corpora and their preparation. Without training text and task, the built-in corpus is used."""

    folder: Path = Path("mtkit-data")
    """Folder of the prepared data."""
    train: Corpora = ()
    """Training text: one corpus or a list."""
    valid: Corpora = ()
    """Validation text: one corpus or a list."""
    test: Annotated[
        dict[SideName, Corpora],
        BeforeValidator(_named, json_schema_input_type=dict[SideName, Corpora] | Corpus | tuple[Corpus, ...]),
    ] = Field(default_factory=dict)
    """Test sides by name; each is one corpus or a list. A corpus without a name is the side `test`."""
    source_language: SourceLanguage = "en"
    """Source language of corpora without a direction. Default: the suffix of the training file names (`train.fr`), else
    the language of the text's script, else en. The script replaces an uncommon suffix: `train.kr` in Hangul is ko."""
    target_language: TargetLanguage = "de"
    """Target language of corpora without a direction. Default: as for the source, else de."""
    builtin: Grammar = Grammar()
    task: Task | None = None
    """A built-in task instead of text: its name, or its settings. `mtkit tasks` lists the tasks."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    tokenizer_from: Path | None = None
    """Run (name or folder) or folder of prepared data whose tokenizer is used instead of a new one, e.g. for a training
    that starts from the run's weights. Its languages are the default of `source_language` and `target_language`."""
    documents: DocumentSettings | None = None
    """Join the training segments of a document. Requires a training corpus with `documents`."""
    cleaning: Cleaning = Cleaning()

    @property
    def directions(self) -> list[str]:
        """Distinct translation directions of the training corpora, e.g. `en-de`, in order of appearance."""
        return list(dict.fromkeys(self.direction_of(corpus) for corpus in self.train)) or [self._direction]

    def direction_of(self, corpus: Corpus) -> str:
        """Return the direction of a corpus; by default the recipe's."""
        return corpus.direction or self._direction

    @property
    def _direction(self) -> str:
        return f"{self.source_language}-{self.target_language}"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.task is not None and (self.train or self.valid or self.test):
            raise ValueError(
                f"data.task = {self.task.name} draws its own text; leave out data.train, data.valid and data.test "
                "(--train, --valid, --test), or the task (--task)"
            )
        if self.task is not None and self.builtin != Grammar():
            raise ValueError(
                f"data.task = {self.task.name} and data.builtin are two sources of text; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _training_text_comes_with_validation_text(self) -> Self:
        if not self.train and (self.valid or self.test):
            raise ValueError(
                "data.valid and data.test need training text: give --train SRC TGT (data.train in a recipe)"
            )
        if self.train and not self.valid:
            raise ValueError(
                "training text needs validation text, a few hundred different lines: give --valid SRC TGT "
                "(data.valid in a recipe)"
            )
        if empty := [name for name, corpora in self.test.items() if not corpora]:
            raise ValueError(f"the test side {empty[0]} has no text; leave it out of data.test")
        if taken := {"train", "valid"} & set(self.test):
            raise ValueError(f"a test side cannot be named {taken.pop()}; choose another name in data.test")
        if taken := {name for name in self.test if Path(name).suffix in BESIDE}:
            raise ValueError(
                f"a test side cannot be named {taken.pop()}: files next to translations have this suffix; "
                "choose another name in data.test"
            )
        return self

    @model_validator(mode="after")
    def _held_out_directions_are_trained(self) -> Self:
        known = self.directions
        if any(corpus.sacrebleu is not None for corpus in self.train):
            raise ValueError("data.train has sacrebleu, which applies to validation and test sides only")
        for name, corpora in (("valid", self.valid), *self.test.items()):
            for corpus in corpora:
                if corpus.weight != 1:
                    raise ValueError(
                        f"the {name} side has a weight, which applies to training corpora only; leave it out"
                    )
                if corpus.scores is not None:
                    raise ValueError(
                        f"the {name} side has scores, which apply to training corpora only; held-out sides stay whole"
                    )
                if corpus.translated_by is not None:
                    raise ValueError(
                        f"the {name} side has translated_by, which applies to training corpora only; give both sides"
                    )
                if (direction := self.direction_of(corpus)) not in known:
                    raise ValueError(
                        f"the {name} side has the direction {direction}, which is not among the training corpora's "
                        f"({', '.join(known)}); give each corpus its `direction`"
                    )
        if len(known) > 1 and (odd := [direction for direction in known if direction.count("-") != 1]):
            raise ValueError(f"direction {odd[0]}: write a direction as en-de, with no other hyphen in the languages")
        return self

    @model_validator(mode="after")
    def _documents_need_boundaries(self) -> Self:
        marked = any(corpus.documents is not None for corpus in self.train)
        if self.documents is not None and self.task is None and not marked:
            raise ValueError("data.documents needs a training corpus with document boundaries (its `documents`)")
        return self
