"""The languages of text for which the settings name none: from file names, or from the script of the text."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal

from mtkit.data.lines.abbreviations import CODES
from mtkit.data.readers.corpora import name_of, read_corpus
from mtkit.data.readers.text import Lines
from mtkit.errors import DataError
from mtkit.languages import bleu_tokenizer, lacks_spaces, language_in, languages_of, listed, script_language
from mtkit.recipe.data import Corpus, DataSettings

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
