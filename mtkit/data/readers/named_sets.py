"""sacrebleu's named test sets: downloaded at first use into sacrebleu's folder (~/.sacrebleu, or $SACREBLEU)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtkit.errors import DataError, did_you_mean


@dataclass(frozen=True)
class NamedTestSet:
    """A test set in one language pair."""

    name: str
    """The name of a side, as wmt14-full.en-de."""
    sources: Sequence[str]
    references: Sequence[str]


def read_test_set(name: str, languages: str) -> NamedTestSet:
    """The test set `name`, e.g. wmt14, in the language pair `languages`, e.g. en-de.

    Raises: DataError for an unknown name or pair, for a set with several references, and where it
    cannot be downloaded or read.
    """
    from pathlib import Path

    from sacrebleu.dataset import DATASETS

    from mtkit.data.readers.text import Lines

    if name not in DATASETS:
        raise DataError(
            f"sacrebleu has no test set '{name}'{did_you_mean(name, list(DATASETS))}; "
            "`sacrebleu --list` prints the names"
        )
    found = DATASETS[name]
    if languages not in found.langpairs:
        pairs = list(found.langpairs)
        raise DataError(
            f"sacrebleu's {name} has no language pair {languages}{did_you_mean(languages, pairs)}; "
            f"choose with --languages: {', '.join(pairs)}"
        )
    try:
        files = [found.get_source_file(languages), *found.get_reference_files(languages)]
    except (Exception, SystemExit) as error:  # sacrebleu raises bare exceptions, and ends the process at a bad checksum
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(
            f"sacrebleu's test set {name} ({languages}) cannot be had: {why}; "
            "connect to the network, or copy a filled ~/.sacrebleu here"
        ) from error
    sources, *references = (list(Lines(Path(each))) for each in files)
    if len(references) != 1:
        raise DataError(
            f"sacrebleu's {name} ({languages}) has {len(references)} references; translate it with --input {files[0]}, "
            f"and score with --reference {' --reference '.join(files[1:])}"
        )
    if len(references[0]) != len(sources):
        raise DataError(
            f"{files[0]} and {files[1]} differ in their numbers of lines; remove them to download them again"
        )
    return NamedTestSet(f"{name.replace('/', '-')}.{languages}", sources, references[0])
