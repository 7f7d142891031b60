"""Data settings completed before use: the tokenizer of another run, the languages of the text, named test sets."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mtkit.data.builtin.discourse import DocumentTask
from mtkit.data.builtin.registry import find_task
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, RecipeError, did_you_mean, shown
from mtkit.recipe import make_recipe
from mtkit.recipe.data import Corpus, DataSettings, DocumentSettings
from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import RUNS
from mtkit.storage.files import check_regular
from mtkit.storage.records import read_stored
from mtkit.text.corpora import name_of, read_corpus
from mtkit.text.languages import (
    bleu_tokenizer,
    has_spaces,
    known_language,
    lacks_spaces,
    languages_in,
    languages_of,
    script_language,
)
from mtkit.text.sentences import CODES
from mtkit.text.text_files import Lines

OPTIONS = {
    "vocabulary": "--vocabulary",
    "kind": "--tokenizer",
    "normalization": "--normalization",
    "joint": "--separate",
}
"""The options of `mtkit prepare` for these tokenizer settings."""

SourceOrTarget = Literal["source", "target"]

_SAMPLE = 200
"""Lines of a corpus whose script is examined."""


def with_tokenizer(settings: DataSettings) -> DataSettings:
    """Return the settings with the tokenizer settings of the run or prepared data that `tokenizer_from` names.

    Its folder replaces the name. If the settings name neither language, they become the run's languages. Settings
    without `tokenizer_from` are unchanged.

    Raises: DataError if there is no such run or folder, if a setting contradicts its tokenizer, or if it translates
    into several languages and the text's is not named.
    """
    if settings.tokenizer_from is None:
        return settings
    folder = _tokenizer_folder(settings.tokenizer_from)
    if (folder / "prepared.json").is_file():
        data = open_prepared(folder).settings
        directions: Sequence[str] = data.directions
    else:
        check_regular(folder)
        path = folder / "recipe.yaml"
        data = make_recipe(read_settings(path), origin=str(path)).data
        about = read_stored(folder / "run.json", dict[str, Any], "choose another run", error=DataError)
        directions = about.get("directions") or data.directions
    for name in settings.tokenizer.model_fields_set:
        wanted, actual = getattr(settings.tokenizer, name), getattr(data.tokenizer, name)
        if wanted != actual:
            option = f" ({OPTIONS[name]})" if name in OPTIONS else ""
            raise DataError(
                f"data.tokenizer.{name} = {_format(wanted)}{option} contradicts the tokenizer of {folder}, which "
                f"has {_format(actual)}; leave that setting out, or --tokenizer-from (data.tokenizer_from)"
            )
    update: dict[str, Any] = {"tokenizer_from": folder, "tokenizer": data.tokenizer}
    corpora = (*settings.train, *settings.valid, *(corpus for side in settings.test.values() for corpus in side))
    unnamed = not {"source_language", "target_language"} & settings.model_fields_set
    if unnamed and any(corpus.direction is None for corpus in corpora):
        if len(directions) > 1:
            raise DataError(
                f"{folder} translates {', '.join(directions[:5])}{', ...' * (len(directions) > 5)}"
                "; name the languages of your text with --source-language and --target-language"
            )
        update["source_language"], update["target_language"] = languages_of(directions[0])
    return settings.model_copy(update=update)


def _tokenizer_folder(path: Path) -> Path:
    """Return the folder at the path, or of the run with that name. Raises: DataError if it has no tokenizer."""
    is_name = path.name == str(path) and not any((path / name).is_file() for name in ("prepared.json", "run.json"))
    folder = RUNS / path if is_name else path
    if not (folder / "tokenizer").is_dir():
        runs = sorted(record.parent.name for record in RUNS.glob("*/run.json"))
        hint = did_you_mean(path.name, runs) if is_name else ""
        known = f"; the runs in {RUNS}: {', '.join(runs)}" if is_name and runs else ""
        raise DataError(
            f"--tokenizer-from {path}: no run of that name, and no folder of a run or of prepared data{hint}{known}"
        )
    return folder


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def with_task_defaults(settings: DataSettings) -> DataSettings:
    """Return the settings with the languages and the tokenizer settings of their task, as far as they name none.

    A task of documents has defaults for other sections too. Settings without a task are unchanged. Raises: RecipeError
    for an unknown task, and for settings that its documents rule out.
    """
    if settings.task is None:
        return settings
    task, update = find_task(settings.task.name), dict[str, Any]()
    for field, language in zip(("source_language", "target_language"), task.languages, strict=True):
        if field not in settings.model_fields_set:
            update[field] = language
    if settings.tokenizer_from is None:
        unset = {key: value for key, value in task.tokenizer.items() if key not in settings.tokenizer.model_fields_set}
        update["tokenizer"] = settings.tokenizer.model_copy(update=unset)
    if isinstance(task, DocumentTask):
        update |= _document_defaults(settings, task)
    elif settings.documents is not None:
        raise RecipeError(f"data.documents: the segments of the task {task.name} are independent; leave it out")
    return settings.model_copy(update=update)


def _document_defaults(settings: DataSettings, task: DocumentTask) -> dict[str, Any]:
    """Return the sections of settings with the defaults of the task, as far as they name none."""
    if settings.cleaning.overlap and "overlap" in settings.cleaning.model_fields_set:
        raise RecipeError(
            f"data.cleaning.overlap = true would leave sentences out of documents of the task {task.name}; leave the "
            "setting out: no held-out document is in training"
        )
    update = {}
    for name, defaults in task.settings.items():
        section = getattr(settings, name) or DocumentSettings()
        unset = {key: value for key, value in defaults.items() if key not in section.model_fields_set}
        update[name] = section.model_copy(update=unset)
    return update


def with_languages(settings: DataSettings) -> tuple[DataSettings, list[str]]:
    """Return the settings with both languages set, and messages: the origin of each language, and warnings.

    A language that the settings do not name is the suffix of the training text's file or column name, or else the
    language of its script, or else the language of the validation and test text by these rules, or else the default.
    Nothing changes if every training corpus has a direction, and for the built-in corpus.

    Raises: DataError if text cannot be read.
    """
    if not settings.train:
        return settings, []
    sides = (settings.train, (*settings.valid, *(corpus for side in settings.test.values() for corpus in side)))
    unnamed, held_out = ([corpus for corpus in side if corpus.direction is None] for side in sides)
    languages: dict[str, str] = {}
    origins = []
    for side in ("source", "target") if unnamed else ():
        field = f"{side}_language"
        if field in settings.model_fields_set:
            continue
        language, origin = _guess_language(unnamed, side)
        if language is None:
            language, origin = _guess_language(held_out, side)
        languages[field] = language or getattr(settings, field)
        origins.append(f"{side} {languages[field]} ({origin})")
    settings = settings.model_copy(update=languages)
    lines = [f"languages: {', '.join(origins)}"] if origins else []
    if any("default" in origin for origin in origins):
        lines[0] += "; name others with --source-language and --target-language"
    return settings, [*lines, *_contradictions(settings)]


def _guess_language(corpora: Sequence[Corpus], side: SourceOrTarget) -> tuple[str | None, str]:
    """Return the language of one side of the corpora, and its origin."""
    for corpus in corpora:
        language, origin = _named_languages(corpus)[side]
        if language:
            return language, origin
    for corpus in corpora:
        if language := script_language(_first_lines(corpus, side)):
            return language, f"from the script of {name_of(corpus, side)}"
    return None, "by default"


def _named_languages(corpus: Corpus) -> dict[SourceOrTarget, tuple[str | None, str]]:
    """Return the languages that a corpus's source and target names end in, or None, each with its origin.

    The only language of a script replaces a code of two letters that is not one of its codes: train.kr is Korean if its
    text is, although kr is Kanuri.
    """
    names: dict[SourceOrTarget, str] = {"source": str(corpus.source or ""), "target": str(corpus.target or "")}
    languages = dict[SourceOrTarget, tuple[str | None, str]]()
    for (side, name), language in zip(names.items(), languages_in(**names), strict=True):
        languages[side] = language, f"from the name {Path(name).name}"
        if language and len(language) == 2 and known_language(language) is None:
            script = script_language(_first_lines(corpus, side))
            if script and script not in languages_in(**names):  # which exchanged files have
                languages[side] = script, f"from the script of {name_of(corpus, side)}"
    return languages


def _contradictions(settings: DataSettings) -> Iterator[str]:
    """Yield warnings about file names of other languages, and text without spaces that words are expected of."""
    if settings.tokenizer.kind == "words":
        unspaced = (
            language for way in settings.directions for language in languages_of(way) if not has_spaces(language)
        )
        yield from (
            f"warning: {language} has no spaces between words, so that a tokenizer of words makes phrases pieces; use "
            "--tokenizer bpe or unigram"
            for language in dict.fromkeys(unspaced)
        )
    sides = {"train": settings.train, "valid": settings.valid, **settings.test}
    first = _named_languages(settings.train[0])
    for name, corpus in ((name, corpus) for name, corpora in sides.items() for corpus in corpora):
        source, target = languages_of(settings.direction_of(corpus))
        if corpus.direction is None:
            source, target = settings.source_language, settings.target_language
        named = {side: language for side, (language, _) in _named_languages(corpus).items()}
        if _main_code(named["source"]) == _main_code(target) != _main_code(source) == _main_code(named["target"]):
            yield (
                f"warning: {name} has {corpus.source} as source and {corpus.target} as target, but the direction is "
                f"{source} to {target}; exchange the files if they are the wrong way round"
            )
        elif _are_of_other_languages(corpus, named, {side: language for side, (language, _) in first.items()}):
            direction = f"{named['source'] or source}-{named['target'] or target}"
            remedy = f"give the corpus `direction: {direction}`" if name == "train" else "leave the side out"
            files = f"{corpus.source} as source" + (f" and {corpus.target} as target" if corpus.target else "")
            yield (
                f"warning: {name} has {files}, but the direction is {source} to {target}; if the names are right, "
                f"{remedy}"
            )
        if name == "train" and bleu_tokenizer(target) == "13a" and lacks_spaces(_first_lines(corpus, "target")):
            yield (
                f"warning: {name_of(corpus, 'target')} has no spaces between words, which BLEU for the language "
                f"{target} expects (tokenizer 13a); name its language, as with --target-language "
                f"{script_language(_first_lines(corpus, 'target'))}"
            )


def _first_lines(corpus: Corpus, side: SourceOrTarget) -> list[str]:
    """Return the first lines of one side of a corpus; none of a data set, which may have to be downloaded first.

    Unreadable text gives no lines; `prepare` reports the error later.
    """
    name = getattr(corpus, side)
    if corpus.dataset is not None or corpus.sacrebleu is not None or name is None:
        return []
    with suppress(DataError):
        if corpus.file is None:
            return list(islice(Lines(Path(name)), _SAMPLE))
        return [getattr(pair, side) for pair in islice(read_corpus(corpus), _SAMPLE)]
    return []


Named = Mapping[SourceOrTarget, str | None]


def _are_of_other_languages(corpus: Corpus, named: Named, first: Named) -> bool:
    """Return whether a corpus's names end in other languages than the first training corpus's names."""
    if corpus.direction is not None or named["source"] == named["target"]:
        return False
    return any(_other_language(named[side], first[side]) for side in first)


def _other_language(one: str | None, other: str | None) -> bool:
    """Return whether two names are of different languages; codes of different length may be of the same one."""
    one, other = _main_code(one), _main_code(other)
    return one is not None and other is not None and len(one) == len(other) and one != other


def _main_code(language: str | None) -> str | None:
    """Return one code for all names of a known language; for others, the name without region and script."""
    main = (language or "").lower().replace("_", "-").partition("-")[0]
    return known_language(language) or CODES.get(main, main) or None


@dataclass(frozen=True)
class NamedTestSet:
    """A test set of sacrebleu in one language pair."""

    name: str
    """The name of a side, as wmt14-full.en-de."""
    sources: Sequence[str]
    references: Sequence[str]


def with_named_sets(settings: DataSettings) -> DataSettings:
    """Return the settings with each named test set's name replaced by its two text files.

    Raises: DataError as `read_test_set`.
    """

    def replace_names(corpora: Sequence[Corpus]) -> tuple[Corpus, ...]:
        return tuple(corpus if corpus.sacrebleu is None else _with_files(corpus, settings) for corpus in corpora)

    test = {name: replace_names(side) for name, side in settings.test.items()}
    sides = {"valid": replace_names(settings.valid), "test": test}
    return settings.model_copy(update={name: side for name, side in sides.items() if side != getattr(settings, name)})


def _with_files(corpus: Corpus, settings: DataSettings) -> Corpus:
    direction, name = settings.direction_of(corpus), str(corpus.sacrebleu)
    source, *references = _download(name, direction, "give the corpus one of these as its `direction`")
    if len(references) != 1:
        raise DataError(
            f"sacrebleu's {name} ({direction}) has {len(references)} references; give one of them as text files: "
            f"source: {source}, target: {references[0]}"
        )
    return corpus.model_copy(update={"source": source, "target": references[0], "sacrebleu": None})


def read_test_set(name: str, languages: str) -> NamedTestSet:
    """Read the test set `name`, e.g. wmt14, in the language pair `languages`, e.g. en-de.

    It is downloaded at first use, into sacrebleu's folder (~/.sacrebleu, or $SACREBLEU). Raises: DataError for an
    unknown name or pair, for a set with several references, and if it cannot be downloaded or read.
    """
    files = _download(name, languages, "choose with --languages")
    sources, *references = (list(Lines(path)) for path in files)
    if len(references) != 1:
        raise DataError(
            f"sacrebleu's {name} ({languages}) has {len(references)} references; translate it with --input {files[0]}, "
            f"and score with --reference {' --reference '.join(map(str, files[1:]))}"
        )
    if len(references[0]) != len(sources):
        raise DataError(
            f"{files[0]} and {files[1]} differ in their numbers of lines; remove them to download them again"
        )
    return NamedTestSet(f"{name.replace('/', '-')}.{languages}", sources, references[0])


def _download(name: str, languages: str, advice: str) -> list[Path]:
    """Return the files of the source and of the references; `advice` explains how to choose another language pair.

    Raises: DataError for an unknown name or pair, and if they cannot be downloaded.
    """
    from sacrebleu.dataset import DATASETS

    if name not in DATASETS:
        raise DataError(
            f"sacrebleu has no test set {shown(name)}{did_you_mean(name, list(DATASETS))}; "
            "`sacrebleu --list` prints the names"
        )
    dataset = DATASETS[name]
    if languages not in dataset.langpairs:
        pairs = list(dataset.langpairs)
        raise DataError(
            f"sacrebleu's {name} has no language pair {languages}{did_you_mean(languages, pairs)}; "
            f"{advice}: {', '.join(pairs)}"
        )
    try:
        files = (dataset.get_source_file(languages), *dataset.get_reference_files(languages))
    except (Exception, SystemExit) as error:  # sacrebleu raises bare exceptions, and ends the process at a bad checksum
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(
            f"sacrebleu's test set {name} ({languages}) is not available: {why}; "
            "connect to the network, or copy a filled ~/.sacrebleu here"
        ) from error
    return [Path(file) for file in files]
