"""Files of contrastive translations: mtkit's JSON Lines, ContraPro's and LingEval97's JSON.

ContraPro: Müller et al., "A Large-Scale Test Set for the Evaluation of Context-Aware Pronoun Translation in Neural
Machine Translation", WMT 2018. A segment has all its wrong translations; contexts are in two other files, which its
script `json2text_and_context.pl` writes. LingEval97: Sennrich, "How Grammatical is Character-level Neural Machine
Translation?", EACL 2017. Each wrong translation is a segment. Labels have the bins of the evaluation scripts of both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtkit.errors import DataError, MtkitError, shown
from mtkit.text.tables import flatten
from mtkit.text.text_files import Lines, Repairs, count_lines, open_file

Label = str | int | float | bool

CONTRAPRO, LINGEVAL = "src segment", "reference"
"""Fields by which the objects of these test sets are recognised."""

FARTHEST_ANTECEDENT, FARTHEST_WORD = 3, 15
"""Distances above these are one bin, of ContraPro (in sentences) and of LingEval97 (in words)."""

FREQUENCIES = {">10k": 10_000, ">5k": 5_000, ">2k": 2_000, ">1k": 1_000, ">500": 500, ">200": 200, ">100": 100}
FREQUENCIES |= {">50": 50, ">20": 20, ">10": 10, ">5": 5, ">2": 2}
"""LingEval97's bins of the frequency in the training data: a frequency is in the first bin whose number it exceeds."""


@dataclass(frozen=True)
class Item:
    """A source segment with its right translation and wrong ones."""

    number: int
    """Number of its line or JSON object in the file, from 1."""
    source: str
    right: str
    wrong: tuple[str, ...]
    context: tuple[tuple[str, str], ...]
    """Source sentences before it in its document, with their translations, oldest first."""
    labels: dict[str, Label]


@dataclass(frozen=True)
class ContrastiveFile:
    """The items of a file: JSON Lines, or one JSON list; each loop reads the file again.

    `contexts` are the files of source and target contexts of ContraPro.

    Raises: DataError, while reading, for a line or an object that is no item, with its number.
    """

    path: Path
    contexts: tuple[Path, Path] | None = None

    def __iter__(self) -> Iterator[Item]:
        for path in (self.path, *(self.contexts or ())):
            if path.is_fifo():
                raise DataError(f"{path} is a pipe, and contrastive files are read several times; write it to a file")
        sentences = None if self.contexts is None else self._context_sentences(*self.contexts)
        for number, where, row in _objects(self.path):
            context = None if sentences is None else next(sentences)
            yield from _items(number, row, where, context)

    def count(self) -> int:
        """Return the number of items, after all are read and checked. Raises: DataError for no item."""
        items = sum(1 for _ in self)
        if not items:
            raise DataError(f"{self.path} has no contrastive translations; give a file with some")
        return items

    def _context_sentences(self, source: Path, target: Path) -> Iterator[Sequence[tuple[str, str]]]:
        """Yield the context of each object.

        The files have the same number of lines for each translation, right or wrong. A blank line is no sentence.
        """
        counts = []
        for _, where, row in _objects(self.path):
            if isinstance(row, dict) and CONTRAPRO not in row:
                raise MtkitError(f"{where}: files of contexts belong to ContraPro; put contexts into the objects")
            counts.append(1 + len(_errors(row, where)))
        lines = [count_lines(file) for file in (source, target)]
        length, rest = divmod(lines[0], sum(counts) or 1)
        if lines[0] != lines[1] or rest or not length:
            raise DataError(
                f"{source} has {lines[0]:,} lines, {target} has {lines[1]:,}, and {self.path} has {sum(counts):,} "
                "translations; the contexts need the same number of lines for each translation"
            )
        pairs = zip(Lines(source), Lines(target), strict=True)
        for count in counts:
            context, *_ = [list(islice(pairs, length)) for _ in range(count)]
            yield [pair for pair in context if all(text.strip() for text in pair)]


def _is_list(path: Path) -> bool:
    """Return whether the file is one JSON list, not JSON Lines."""
    with open_file(path) as file:
        return file.read(1000).decode("utf-8-sig", "replace").lstrip().startswith("[")


def _objects(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield the number from 1, the place in words and the JSON value of each line, or of each element of the list."""
    if _is_list(path):
        with open_file(path) as file:
            content = file.read()
        try:
            rows = from_json(content.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
        except ValueError as error:
            raise DataError(f"{path} is not a JSON list: {error}; fetch or write it again") from error
        yield from ((number, f"{path}, object {number:,}", row) for number, row in enumerate(rows, start=1))
        return
    for number, line in enumerate(Lines(path), start=1):
        where = f"{path}, line {number:,}"
        try:
            row = from_json(line, allow_inf_nan=False)
        except ValueError as error:
            what = "the line is empty" if not line.strip() else str(error)
            raise DataError(f"{where}: not JSON ({what}); each line must hold one object") from error
        yield number, where, row


def _items(number: int, row: Any, where: str, context: Sequence[tuple[str, str]] | None) -> Iterator[Item]:
    """Yield the items of an object in any of the formats. Raises: DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object with source, right and wrong")
    if CONTRAPRO in row:
        wrong = tuple(_text(error, "contrastive", where) for error in _errors(row, where))
        texts = _text(row, CONTRAPRO, where), _text(row, "ref segment", where)
        yield Item(number, *texts, wrong, tuple(context or ()), _contrapro_labels(row))
        return
    if LINGEVAL in row and "errors" in row:
        texts = _text(row, "source", where), _text(row, LINGEVAL, where)
        for error in _errors(row, where):
            yield Item(number, *texts, (_text(error, "contrastive", where),), (), _lingeval_labels(error))
        return
    if "wrong" not in row:
        raise DataError(f"{where}: {_lack(row, 'wrong')}")
    translations = row["wrong"] if isinstance(row["wrong"], list) else [row["wrong"]]
    if not translations:
        raise DataError(f"{where}: wrong is an empty list; give a wrong translation, or a list of several")
    wrong = tuple(_checked(text, "wrong", where) for text in translations)
    right = _text(row, "source", where), _text(row, "right", where)
    yield Item(number, *right, wrong, _context(row, where), _labels(row.get("labels"), where))


def _errors(row: Any, where: str) -> list[dict[str, Any]]:
    """Return the wrong translations of ContraPro and LingEval97."""
    errors = row.get("errors") if isinstance(row, dict) else None
    if not isinstance(errors, list) or not errors or not all(isinstance(error, dict) for error in errors):
        raise DataError(f"{where}: no list of errors, each with a contrastive translation")
    return errors


def _context(row: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    sides = [row.get(name) or [] for name in ("source_context", "target_context")]
    if not all(isinstance(side, list) and all(isinstance(text, str) for text in side) for side in sides):
        raise DataError(f"{where}: source_context and target_context must be lists of sentences")
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{where}: source_context has {len(sides[0]):,} sentences and target_context has {len(sides[1]):,}; "
            "give the translation of each sentence"
        )
    source, target = ([str(flatten(text, Repairs(), where, check=True)) for text in side] for side in sides)
    return tuple(pair for pair in zip(source, target, strict=True) if all(text.strip() for text in pair))


def _labels(labels: Any, where: str) -> dict[str, Label]:
    if not isinstance(labels or {}, dict):
        raise DataError(f'{where}: labels must be an object, as {{"kind": "pronoun", "distance": 4}}')
    for name, value in (labels or {}).items():
        if not isinstance(value, str | int | float | bool | None):
            raise DataError(f"{where}: the label {shown(name)} must be a text, a number, true or false")
    return {name: value for name, value in (labels or {}).items() if value is not None}


def _contrapro_labels(row: Mapping[str, Any]) -> dict[str, Label]:
    pronouns = [row.get(name) for name in ("src pronoun", "ref pronoun")]
    labels = {
        "pronoun": ":".join(map(str, pronouns)).lower() if None not in pronouns else None,
        "distance": _up_to(FARTHEST_ANTECEDENT, row.get("ante distance")),
        "intrasegmental": row.get("intrasegmental"),
    }
    return {name: value for name, value in labels.items() if isinstance(value, str | int)}


def _lingeval_labels(error: Mapping[str, Any]) -> dict[str, Label]:
    frequency = _whole(error.get("frequency"))
    if isinstance(frequency, int):
        frequency = next((name for name, above in FREQUENCIES.items() if frequency > above), frequency)
    labels = {
        "type": error.get("type"),
        "distance": _up_to(FARTHEST_WORD, error.get("distance")),
        "frequency": frequency,
    }
    return {name: value for name, value in labels.items() if isinstance(value, str | int)}


def _whole(value: Any) -> Any:
    """Return a text of digits as a number, and another value as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else value


def _up_to(most: int, value: Any) -> Any:
    value = _whole(value)
    return f">{most}" if isinstance(value, int) and value > most else value


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise DataError(f"{where}: {_lack(row, name)}")
    return _checked(row[name], name, where)


def _checked(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name} is {shown(value)}, not a text")
    return str(flatten(value, Repairs(), where, check=True))


def _lack(row: Mapping[str, Any], name: str) -> str:
    return f"no {shown(name)} among {', '.join(map(shown, row))}"[:300]
