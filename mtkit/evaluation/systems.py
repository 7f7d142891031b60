"""The files that several systems translated: found in run folders, read, and checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired

from typing_extensions import TypedDict

from mtkit.data.readers import Lines
from mtkit.errors import DataError, MtkitError, RunError, did_you_mean, shown
from mtkit.evaluation.scores import check_counts
from mtkit.runs import Run
from mtkit.stored import read_stored, stored


@dataclass(frozen=True)
class Translated:
    """One system's translations of one side, and what belongs to them."""

    system: str
    """Name of the system in tables."""
    hypothesis: Path
    references: tuple[Path, ...]
    source: Path | None = None
    direction: Path | None = None
    """File with the direction of each line, e.g. en-fr."""


@dataclass(frozen=True)
class SystemTexts:
    """The same segments by several systems, line by line."""

    hypotheses: list[list[str]]
    """Translations, one list per system."""
    references: list[list[str]]
    sources: list[str] | None
    directions: list[str] | None
    marked: list[Path]
    """Files of translations and references that begin with a byte order mark, which is no text."""


def run_sides(runs: Sequence[Run], names: Sequence[str] = ()) -> dict[str, list[Translated]]:
    """Every side's translations by every run, the runs in the order given.

    The sides are those of `names`, or all that the first run translated with its latest checkpoint that translated, in
    the order in which they were finished; where there are several runs, those that the first translated by itself.

    Raises: RunError where a run has no translations of a side, or damaged ones; the message names both.
    """
    labels = [run.folder.name for run in runs]
    if len({run.folder.resolve() for run in runs}) > len(set(labels)):
        labels = [str(run.folder) for run in runs]
    found = [_translations(run, label) for run, label in zip(runs, labels, strict=True)]
    sides = list(dict.fromkeys(names))
    if not sides:
        first = {name: each for name, each in found[0].items() if len(runs) == 1 or not each.ensemble} or found[0]
        latest = max(first.values(), key=lambda each: each.finished).checkpoint
        sides = [name for name, each in first.items() if each.checkpoint == latest]
    for run, translations in zip(runs, found, strict=True):
        for side in sides:
            if side not in translations:
                hint = did_you_mean(side, list(translations))
                raise RunError(
                    f"{run.folder} has no translations of a side {shown(side)}{hint}; "
                    f"it has: {', '.join(translations)}; choose with --side, or run `mtkit translate` first"
                )
    return {side: [translations[side].files for translations in found] for side in sides}


def read_texts(files: Sequence[Translated], *, sources: bool = False) -> SystemTexts:
    """What several systems translated, where all have the same references and sources.

    `sources` says that they are needed; they are compared wherever there are any.

    Raises: DataError for files that cannot be read, are not equally long, or not the same for all systems; MtkitError
    where sources are needed and not known.
    """
    first = files[0]
    marked: list[Path] = []

    def read(path: Path) -> list[str]:
        lines = Lines(path)
        found = list(lines)
        marked.extend([path] * lines.repairs.byte_order_marks)
        return found

    references = [read(each) for each in first.references]
    hypotheses = []
    for each in files:
        _same(first.references, each.references)
        hypotheses.append(read(each.hypothesis))
        check_counts(
            len(hypotheses[-1]),
            [len(lines) for lines in references],
            [str(path) for path in (each.hypothesis, *each.references)],
        )
        if first.source is not None and each.source is not None:
            _same([first.source], [each.source])
    if sources and first.source is None:
        raise MtkitError(f"the source of {first.hypothesis} is unknown; give it with --source")
    return SystemTexts(
        hypotheses,
        references,
        _beside(first.hypothesis, first.source, len(references[0])) if sources else None,
        _beside(first.hypothesis, first.direction, len(references[0])),
        marked,
    )


@stored
class _Record(TypedDict):
    """What is known of a side's translations."""

    finished: str
    checkpoint: NotRequired[str]


class _TranslatedSide(NamedTuple):
    """A side that a run has translated."""

    finished: str
    """Time at which the translation ended."""
    name: str
    checkpoint: str | None
    ensemble: bool
    """Whether an ensemble translated it."""
    files: Translated


def _translations(run: Run, label: str) -> dict[str, _TranslatedSide]:
    """By name, in the order in which they were finished."""
    found: list[_TranslatedSide] = []
    for record in (run.folder / "translations").glob("*.json"):
        text, reference, source, direction = (
            record.with_suffix(suffix) for suffix in (".txt", ".reference.txt", ".source.txt", ".direction.txt")
        )
        if not reference.exists():
            continue
        files = Translated(label, text, (reference,), _if_there(source), _if_there(direction))
        about = read_stored(record, _Record, "run `mtkit translate` again", error=RunError)
        found.append(
            _TranslatedSide(about["finished"], record.stem, about.get("checkpoint"), "ensemble" in about, files)
        )
    if not found:
        raise RunError(f"{run.folder} has no translations yet; run `mtkit translate --run {run.folder}` first")
    return {side.name: side for side in sorted(found, key=lambda each: (each.finished, each.name))}


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _beside(hypothesis: Path, path: Path | None, lines: int) -> list[str] | None:
    """A file with a line for each segment. Raises: DataError where it has more or fewer."""
    if path is None:
        return None
    found = list(Lines(path))
    check_counts(lines, [len(found)], [str(hypothesis), str(path)])
    return found


def _same(firsts: Sequence[Path], others: Sequence[Path]) -> None:
    """Raises: DataError where two systems' files differ."""
    for first, other in zip(firsts, others, strict=True):
        if first == other or first.resolve() == other.resolve():
            continue
        lines, others_lines = list(Lines(first)), list(Lines(other))
        if len(lines) != len(others_lines):
            raise DataError(
                f"{first} has {len(lines):,} lines and {other} has {len(others_lines):,}; "
                "compare systems that translated the same side"
            )
        for number, (one, two) in enumerate(zip(lines, others_lines, strict=True), start=1):
            if one != two:
                raise DataError(
                    f"{first} and {other} differ in line {number:,}; compare systems that translated the same side"
                )
