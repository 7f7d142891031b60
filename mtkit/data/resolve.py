"""A tokenizer that prepared data takes over from a run, or from other prepared data, instead of training one.

Languages.

sacrebleu's named test sets: downloaded at first use into sacrebleu's folder (~/.sacrebleu, or $SACREBLEU).
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, did_you_mean, shown
from mtkit.recipe import make_recipe
from mtkit.recipe.data import Corpus, DataSettings, TokenizerSettings
from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import RUNS
from mtkit.storage.files import check_regular
from mtkit.storage.records import read_stored
from mtkit.text.corpora import name_of, read_corpus
from mtkit.text.languages import bleu_tokenizer, lacks_spaces, language_in, languages_of, listed, script_language
from mtkit.text.sentences import CODES
from mtkit.text.text_files import Lines

OPTIONS = {
    "vocabulary": "--vocabulary",
    "kind": "--tokenizer",
    "normalization": "--normalization",
    "joint": "--separate",
}
"""The options of `mtkit prepare` that set these settings of the tokenizer."""


@dataclass(frozen=True)
class _Lender:
    """The run, or the prepared data, that has the tokenizer."""

    folder: Path
    tokenizer: TokenizerSettings
    directions: Sequence[str]


def with_tokenizer(settings: DataSettings) -> DataSettings:
    """The settings with those of the tokenizer that `tokenizer_from` names, and its folder in place of the name.

    Where neither language is named, they are those of the run. Settings without `tokenizer_from` stay as they are.

    Raises: DataError where there is no such run or folder, a setting contradicts its tokenizer, or it translates into
    several languages and the text's is not named.
    """
    if settings.tokenizer_from is None:
        return settings
    lender = _find(settings.tokenizer_from)
    wanted, there = settings.tokenizer, lender.tokenizer
    for name in wanted.model_fields_set:
        asked, has = getattr(wanted, name), getattr(there, name)
        if asked != has:
            option = f" ({OPTIONS[name]})" if name in OPTIONS else ""
            raise DataError(
                f"data.tokenizer.{name} = {_shown(asked)}{option} contradicts the tokenizer of {lender.folder}, which "
                f"has {_shown(has)}; leave that setting out, or --tokenizer-from (data.tokenizer_from)"
            )
    update: dict[str, Any] = {"tokenizer_from": lender.folder, "tokenizer": there}
    corpora = (*settings.train, *settings.valid, *(each for side in settings.test.values() for each in side))
    unnamed = not {"source_language", "target_language"} & settings.model_fields_set
    if unnamed and any(corpus.direction is None for corpus in corpora):
        if len(lender.directions) > 1:
            raise DataError(
                f"{lender.folder} translates {', '.join(lender.directions[:5])}{', ...' * (len(lender.directions) > 5)}"
                "; name the languages of your text with --source-language and --target-language"
            )
        update["source_language"], update["target_language"] = languages_of(lender.directions[0])
    return settings.model_copy(update=update)


def _find(named: Path) -> _Lender:
    """The folder of that path, or the run of that name. Raises: DataError where it has no tokenizer."""
    records = (named / "prepared.json", named / "run.json")
    plain = named.name == str(named) and not any(each.is_file() for each in records)
    folder = RUNS / named if plain else named
    if not (folder / "tokenizer").is_dir():
        runs = sorted(path.parent.name for path in RUNS.glob("*/run.json"))
        hint = did_you_mean(named.name, runs) if plain else ""
        known = f"; the runs in {RUNS}: {', '.join(runs)}" if plain and runs else ""
        raise DataError(
            f"--tokenizer-from {named}: no run of that name, and no folder of a run or of prepared data{hint}{known}"
        )
    if (folder / "prepared.json").is_file():
        data = open_prepared(folder).settings
        return _Lender(folder, data.tokenizer, data.directions)
    check_regular(folder)
    path = folder / "recipe.yaml"
    data = make_recipe(read_settings(path), origin=str(path)).data
    about = read_stored(folder / "run.json", dict[str, Any], "choose another run", error=DataError)
    return _Lender(folder, data.tokenizer, about.get("directions") or data.directions)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


Side = Literal["source", "target"]

_SAMPLE = 200
"""Lines of a corpus whose script is looked at."""


def with_languages(settings: DataSettings) -> tuple[DataSettings, list[str]]:
    """Return the settings with both languages set, and lines for people: the origin of each, and warnings.

    If the settings do not name a language, the suffix of the training text's file or column name is taken, or else the
    language of its script, or else the default. Nothing changes if every training corpus has a direction, and
    for the built-in corpus. Raises: DataError if text cannot be read.
    """
    if not settings.train:
        return settings, []
    unnamed = [each for each in settings.train if each.direction is None]
    found: dict[str, str] = {}
    told = []
    for side in ("source", "target") if unnamed else ():
        field = f"{side}_language"
        if field in settings.model_fields_set:
            continue
        language, why = _found(unnamed, side)
        found[field] = language or getattr(settings, field)
        told.append(f"{side} {found[field]} ({why})")
    settings = settings.model_copy(update=found)
    lines = [f"languages: {', '.join(told)}"] if told else []
    if any("default" in each for each in told):
        lines[0] += "; name others with --source-language and --target-language"
    return settings, [*lines, *_contradictions(settings)]


def _found(corpora: Sequence[Corpus], side: Side) -> tuple[str | None, str]:
    """The language of one side of the training corpora, and what it comes from."""
    for corpus in corpora:
        if (name := getattr(corpus, side)) is not None and (language := language_in(str(name))):
            return language, f"from the name {Path(str(name)).name}"
    for corpus in corpora:
        if language := script_language(_sample(corpus, side)):
            return language, f"from the script of {name_of(corpus, side)}"
    return None, "by default"


def _contradictions(settings: DataSettings) -> Iterable[str]:
    """Warnings about file names of other languages, and about target text that BLEU would not cut into words."""
    sides = {"train": settings.train, "valid": settings.valid, **settings.test}
    for name, corpus in ((name, corpus) for name, corpora in sides.items() for corpus in corpora):
        source, target = languages_of(settings.direction_of(corpus))
        if corpus.direction is None:
            source, target = settings.source_language, settings.target_language
        ends = [language_in(str(each)) if each is not None else None for each in (corpus.source, corpus.target)]
        if _code(ends[0]) == _code(target) != _code(source) == _code(ends[1]):
            yield (
                f"warning: {name} has {corpus.source} as source and {corpus.target} as target, but the direction is "
                f"{source} to {target}; exchange the files if they are the wrong way round"
            )
        if name == "train" and bleu_tokenizer(target) == "13a" and lacks_spaces(_sample(corpus, "target")):
            yield (
                f"warning: {name_of(corpus, 'target')} has no spaces between words, which BLEU for the language "
                f"{target} expects (tokenizer 13a); name its language, as with --target-language ja"
            )


def _sample(corpus: Corpus, side: Side) -> list[str]:
    """The first lines of one side of a corpus; none of a data set, which may have to be downloaded first.

    Unreadable text gives no lines; `prepare` reports the error later.
    """
    given = getattr(corpus, side)
    if corpus.dataset is not None or corpus.sacrebleu is not None or given is None:
        return []
    with suppress(DataError):
        if corpus.file is None:
            return list(islice(Lines(Path(given)), _SAMPLE))
        return [getattr(pair, side) for pair in islice(read_corpus(corpus), _SAMPLE)]
    return []


def _code(language: str | None) -> str | None:
    """One code for all names of a language that mtkit lists; for others, the name without region and script."""
    main = (language or "").lower().replace("_", "-").partition("-")[0]
    return listed(language) or CODES.get(main, main) or None


@dataclass(frozen=True)
class NamedTestSet:
    """A test set in one language pair."""

    name: str
    """The name of a side, as wmt14-full.en-de."""
    sources: Sequence[str]
    references: Sequence[str]


def with_named_sets(settings: DataSettings) -> DataSettings:
    """The settings with the two text files of each named test set in place of its name.

    Raises: DataError as `read_test_set`.
    """

    def found(corpora: Sequence[Corpus]) -> tuple[Corpus, ...]:
        return tuple(each if each.sacrebleu is None else _with_files(each, settings) for each in corpora)

    sides = {"valid": found(settings.valid), "test": {name: found(side) for name, side in settings.test.items()}}
    return settings.model_copy(update={name: side for name, side in sides.items() if side != getattr(settings, name)})


def _with_files(corpus: Corpus, settings: DataSettings) -> Corpus:
    direction, name = settings.direction_of(corpus), str(corpus.sacrebleu)
    source, *references = _files(name, direction, "give the corpus one of these as its `direction`")
    if len(references) != 1:
        raise DataError(
            f"sacrebleu's {name} ({direction}) has {len(references)} references; give one of them as text files: "
            f"source: {source}, target: {references[0]}"
        )
    return corpus.model_copy(update={"source": source, "target": references[0], "sacrebleu": None})


def read_test_set(name: str, languages: str) -> NamedTestSet:
    """The test set `name`, e.g. wmt14, in the language pair `languages`, e.g. en-de.

    Raises: DataError for an unknown name or pair, for a set with several references, and where it
    cannot be downloaded or read.
    """
    files = _files(name, languages, "choose with --languages")
    sources, *references = (list(Lines(each)) for each in files)
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


def _files(name: str, languages: str, advice: str) -> list[Path]:
    """The files of the source and of the references; `advice` says how another language pair is chosen.

    Raises: DataError for an unknown name or pair, and where they cannot be downloaded.
    """
    from sacrebleu.dataset import DATASETS

    if name not in DATASETS:
        raise DataError(
            f"sacrebleu has no test set {shown(name)}{did_you_mean(name, list(DATASETS))}; "
            "`sacrebleu --list` prints the names"
        )
    found = DATASETS[name]
    if languages not in found.langpairs:
        pairs = list(found.langpairs)
        raise DataError(
            f"sacrebleu's {name} has no language pair {languages}{did_you_mean(languages, pairs)}; "
            f"{advice}: {', '.join(pairs)}"
        )
    try:
        return [Path(each) for each in (found.get_source_file(languages), *found.get_reference_files(languages))]
    except (Exception, SystemExit) as error:  # sacrebleu raises bare exceptions, and ends the process at a bad checksum
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(
            f"sacrebleu's test set {name} ({languages}) cannot be had: {why}; "
            "connect to the network, or copy a filled ~/.sacrebleu here"
        ) from error
