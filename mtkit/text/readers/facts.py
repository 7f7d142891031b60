"""What a corpus holds: counted, checked and fingerprinted in one pass.

The languages of text for which the settings name none: from file names, or from the script of the text.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.terminal import ProgressBar, silent
from mtkit.text.characters import ODDITIES
from mtkit.text.languages import bleu_tokenizer, lacks_spaces, language_in, languages_of, listed, script_language
from mtkit.text.readers.corpora import name_of, read_corpus
from mtkit.text.readers.text import Lines, Repairs
from mtkit.text.sentences import CODES

_Row = TypeVar("_Row", bound=Sequence[Any])

_ROWS, _BLOCK = 1_000, 10_000
"""Rows that are measured together; and those after which the ids of their documents are, a multiple."""

_SEPARATORS = ("\u2028", "\u2029")


@dataclass(frozen=True)
class Facts:
    """Counts, repairs and fingerprint of a corpus or a text file."""

    name: str
    """Name for messages."""
    lines: int
    """Segment pairs, or lines of the one file."""
    bytes: int
    """Bytes of the text in UTF-8, of both sides together, with one for the end of each line."""
    sha256: str
    """Hexadecimal digits of a hash of the text and the documents: the same whether it lies in text files, gzipped or
    not, or in columns, and whatever had to be put right."""
    carriage_returns: int
    """Carriage returns dropped at the end of a line or of a field."""
    byte_order_marks: int
    """Byte order marks dropped at the start of a file."""
    inner_newlines: int
    """Fields with a newline, which became a space."""
    line_separators: int
    """Characters U+2028 and U+2029, which look like ends of lines and stay in the text."""
    inner_carriage_returns: int = 0
    """Carriage returns within a line, which stay in the text; in old Macintosh files they alone end lines."""
    oddities: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """For each of `ODDITIES` that is there, by side: the number of lines that have it, and the first of them."""


class Measuring:
    """Measures rows as they are read: a number, one or two texts, an id each."""

    def __init__(self, name: str) -> None:
        """`name`: what messages call them. Whatever reads the rows counts its `repairs`."""
        self.name, self.repairs = name, Repairs()
        self.lines = 0
        """Rows so far."""
        self._digest = hashlib.sha256()
        self._documents: list[str] = []
        self._bytes = self._returns = self._separators = 0
        self._oddities: dict[str, dict[str, list[int]]] = {}

    def through(self, rows: Iterable[_Row]) -> Iterator[_Row]:
        """The same rows, measured some before they are given."""
        rows = iter(rows)
        while chunk := list(islice(rows, _ROWS)):
            self._add(chunk)
            yield from chunk

    def _add(self, rows: Sequence[Sequence[Any]]) -> None:
        """What hashes alike is alike, for no field has a newline."""
        text = "\n".join([field for row in rows for field in row[1:3]]) + "\n"
        encoded = text.encode()
        self._digest.update(encoded)
        self._documents += [f"{document}\n" for row in rows for document in row[3:] if document is not None]
        self.lines += len(rows)
        if self.lines % _BLOCK == 0:
            self._digest.update("".join(self._documents).encode())
            self._documents.clear()
        self._bytes += len(encoded)
        self._returns += text.count("\r")
        self._separators += sum(text.count(each) for each in _SEPARATORS)
        for kind, has in ODDITIES.items():
            if has(text.replace("\n", " ") if kind == "invisible" else text):
                self._add_oddities(kind, has, rows)

    def _add_oddities(self, kind: str, has: Callable[[str], bool], rows: Sequence[Sequence[Any]]) -> None:
        for place, side in enumerate(("source", "target"), start=1):
            numbers = [row[0] for row in rows if place < len(row) and has(row[place])]
            if numbers:
                known = self._oddities.setdefault(kind, {}).setdefault(side, [0, numbers[0]])
                known[0] += len(numbers)

    def check(self) -> None:
        """Raises: DataError where there was no row."""
        if self.lines == 0:
            raise DataError(f"{self.name} is empty; give text with one segment per line")

    @property
    def facts(self) -> Facts:
        """The facts of all rows so far. Raises: DataError where there was none."""
        self.check()
        digest = self._digest.copy()
        digest.update("".join(self._documents).encode())
        return Facts(
            self.name,
            self.lines,
            self._bytes,
            digest.hexdigest(),
            line_separators=self._separators,
            inner_carriage_returns=self._returns,
            oddities=self._oddities,
            **vars(self.repairs),
        )


def measure_file(path: Path) -> Facts:
    """The facts of one text file. Raises: DataError where it is missing, damaged, empty or not UTF-8."""
    measuring = Measuring(str(path))
    return _measured(measuring, enumerate(Lines(path, measuring.repairs)))


def measure_corpus(corpus: Corpus, progress: ProgressBar = silent) -> Facts:
    """The facts of a corpus. Raises: DataError where it cannot be read to the end, as `read_corpus`, or is empty."""
    measuring = Measuring(name_of(corpus))
    pairs = read_corpus(corpus, measuring.repairs)
    return _measured(measuring, progress(pairs, f"reading {measuring.name}", None))


def _measured(measuring: Measuring, rows: Iterable[Sequence[Any]]) -> Facts:
    for _ in measuring.through(rows):
        pass
    return measuring.facts


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
