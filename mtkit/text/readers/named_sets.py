"""sacrebleu's named test sets: downloaded at first use into sacrebleu's folder (~/.sacrebleu, or $SACREBLEU)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtkit.errors import DataError, did_you_mean, shown
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.text.readers.text import Lines


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
