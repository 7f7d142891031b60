"""Translation files of several systems: find them in run folders, read them, and check that they match."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired

from typing_extensions import TypedDict

from mtkit.errors import DataError, MtkitError, RunError, did_you_mean, shown
from mtkit.evaluation.scores import check_counts
from mtkit.runs import Run
from mtkit.storage.records import Finite, read_stored, stored
from mtkit.text.text_files import Lines


@dataclass(frozen=True)
class Translated:
    """Files of one system's translations of one side."""

    system: str
    """Name of the system in tables."""
    hypothesis: Path
    references: tuple[Path, ...]
    source: Path | None = None
    direction: Path | None = None
    """File with the direction of each line, e.g. en-fr."""
    documents: Path | None = None
    """File with the id of each line's document."""


@dataclass(frozen=True)
class SystemTexts:
    """Translations of the same segments by several systems, line by line."""

    hypotheses: list[list[str]]
    """Translations, one list per system."""
    references: list[list[str]]
    sources: list[str] | None
    directions: list[str] | None
    documents: list[str] | None
    """Document id of each line; None if unknown or not wanted."""
    marked: list[Path]
    """Translation and reference files that begin with a byte order mark."""


def run_sides(runs: Sequence[Run], names: Sequence[str] = ()) -> dict[str, list[Translated]]:
    """Return the translations by side, one item per run in the given order.

    The sides are `names`. By default, they are the sides that the first run translated with the checkpoint of its
    latest translation, in order of time; with several runs, translations by ensembles are ignored if there are others.

    Raises: RunError with the run and the side if a run has no translations of a side, or damaged ones.
    """
    translated = [_translations(run, label) for run, label in zip(runs, system_names(runs), strict=True)]
    sides = list(dict.fromkeys(names))
    if not sides:
        by_one_run = {name: side for name, side in translated[0].items() if not side.ensemble}
        candidates = translated[0] if len(runs) == 1 else by_one_run or translated[0]
        latest = max(candidates.values(), key=lambda side: side.finished).checkpoint
        sides = [name for name, side in candidates.items() if side.checkpoint == latest]
    for run, translations in zip(runs, translated, strict=True):
        for side in sides:
            if side not in translations:
                hint = did_you_mean(side, list(translations))
                raise RunError(
                    f"{run.folder} has no translations of a side {shown(side)}{hint}; "
                    f"it has: {', '.join(translations)}; choose with --side, or run `mtkit translate` first"
                )
    return {side: [translations[side].files for translations in translated] for side in sides}


def system_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of runs in tables: of their folders, with the whole paths if two names are equal."""
    folders = [run.folder.resolve() for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(folders)) == len(set(names)) else [str(run.folder) for run in runs]


def read_texts(files: Sequence[Translated], *, sources: bool = False, documents: bool = False) -> SystemTexts:
    """Read the files of several systems, and check that all have the same references and sources.

    `sources` makes the sources required; known sources are compared in any case. `documents` reads the sources if they
    are known, and the document ids of the first system that has them.

    Raises: DataError for files that cannot be read, differ in their number of lines, or differ between systems;
    MtkitError if the sources are required but unknown.
    """
    first = files[0]
    marked: list[Path] = []

    def read(path: Path) -> list[str]:
        lines = Lines(path)
        stripped = list(lines)
        marked.extend([path] * lines.repairs.byte_order_marks)
        return stripped

    references = [read(reference) for reference in first.references]
    hypotheses = []
    for file in files:
        _same(first.references, file.references)
        hypotheses.append(read(file.hypothesis))
        check_counts(
            len(hypotheses[-1]),
            [len(lines) for lines in references],
            [str(path) for path in (file.hypothesis, *file.references)],
        )
        if first.source is not None and file.source is not None:
            _same([first.source], [file.source])
    if sources and first.source is None:
        raise MtkitError(f"the source of {first.hypothesis} is unknown; give it with --source")
    ids = next((file.documents for file in files if file.documents is not None), None)
    return SystemTexts(
        hypotheses,
        references,
        _read_matching(first.hypothesis, first.source, len(references[0])) if sources or documents else None,
        _read_matching(first.hypothesis, first.direction, len(references[0])),
        _read_matching(first.hypothesis, ids, len(references[0])) if documents else None,
        marked,
    )


@stored
class _Record(TypedDict):
    """Content of a side's record of translation."""

    finished: str
    checkpoint: NotRequired[str]
    tokens_per_second: NotRequired[Finite | None]


class _TranslatedSide(NamedTuple):
    """One side translated by a run."""

    finished: str
    """End time of the translation."""
    name: str
    checkpoint: str | None
    ensemble: bool
    """Whether an ensemble translated it."""
    files: Translated


def _translations(run: Run, label: str) -> dict[str, _TranslatedSide]:
    """Return a run's translated sides by name, in order of time. Raises: RunError if there are none."""
    sides: list[_TranslatedSide] = []
    for record in (run.folder / "translations").glob("*.json"):
        text, reference, source, direction, documents = (
            record.with_suffix(f"{suffix}.txt") for suffix in ("", ".reference", ".source", ".direction", ".docids")
        )
        if not reference.exists():
            continue
        files = Translated(label, text, (reference,), *map(_if_there, (source, direction, documents)))
        about = read_stored(record, _Record, "run `mtkit translate` again", error=RunError)
        sides.append(
            _TranslatedSide(about["finished"], record.stem, about.get("checkpoint"), "ensemble" in about, files)
        )
    if not sides:
        raise RunError(f"{run.folder} has no translations yet; run `mtkit translate --run {run.folder}` first")
    return {side.name: side for side in sorted(sides, key=lambda side: (side.finished, side.name))}


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _read_matching(hypothesis: Path, path: Path | None, lines: int) -> list[str] | None:
    """Read a file with one line per segment; None without a path. Raises: DataError if it has more or fewer lines."""
    if path is None:
        return None
    contents = list(Lines(path))
    check_counts(lines, [len(contents)], [str(hypothesis), str(path)])
    return contents


def _same(firsts: Sequence[Path], others: Sequence[Path]) -> None:
    """Check that two systems' files are the same. Raises: DataError if not."""
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
