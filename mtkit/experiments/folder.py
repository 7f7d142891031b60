"""The folder of a comparison, which can be resumed, extended and joined with others.

study.json           what is compared: the common settings, the entries, seeds, search
data/copy/           prepared data of the built-in tasks
trials/NAME.json     the settings of a trial, written before it starts
runs/NAME/           its run, like any other: mtkit translate --run mtkit-compare/runs/NAME
logs/NAME.log        its output
results/NAME.json    written last: its row of results, or the reason why it failed, or its validations if it was pruned
results/NAME.safetensors  the statistics of every segment, for intervals and tests
results.jsonl        all rows
compare.md, compare.csv, compare.tex, pictures

NAME is `task.entry.point.seed-1`, as in `copy.band-window_radius-16.peak_rate-0.003.seed-1`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from pydantic import ValidationError
from typing_extensions import TypedDict

from mtkit.errors import MtkitError, shown
from mtkit.experiments.entries import Entry
from mtkit.experiments.rows import STORED_ROW, StoredTrial, validation_score
from mtkit.experiments.study import SearchSettings, Study, StudySettings
from mtkit.experiments.trials import Trial, slug
from mtkit.recipe import differences
from mtkit.storage.files import (
    check_regular,
    file_above,
    inside,
    json_text,
    write_json,
    write_tensors,
    write_text,
    writing,
)
from mtkit.storage.records import explain, read_stored, read_stored_lines, stored
from mtkit.storage.weights import read_tensors

FORMAT = 2
"""Version of the folder's layout; other versions raise an error."""


@stored
class _Entry(TypedDict):
    name: str
    settings: dict[str, Any]


@stored
class _Study(TypedDict):
    """Content of study.json."""

    format: int
    base: dict[str, Any]
    entries: list[_Entry]
    settings: dict[str, Any]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock file `path`, and hold it in the block.

    Raises: MtkitError if its folder cannot be written, or its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path))
        except (OSError, NotImplementedError) as error:
            raise lock_error(path, error) from error
        yield


def lock_error(path: Path, error: Exception) -> MtkitError:
    """Return the error of a lock file that cannot be written, or of a file system without locks."""
    file = file_above(path)
    reason = f"{file} is a file, not a folder" if file else getattr(error, "strerror", None) or error
    return MtkitError(f"cannot lock {path}: {reason}; choose a writable --output on a file system with locks")


class Folder:
    """The folder of a comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str) -> Path:
        """Return the run folder of a trial."""
        return inside(self.path, "runs", name)

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Return the log file of a trial's process."""
        return inside(self.path, "logs", f"{name}.log")

    def open_log(self, name: str) -> tuple[Path, int]:
        """Create the log of a trial's process if there is none; return it, and its size in bytes so far."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        return log, log.stat().st_size

    def lock(self, name: str) -> Path:
        """Return the lock that a trial's process holds."""
        return inside(self.path, "logs", f"{name}.lock")

    def claim(self, name: str) -> Path:
        """Return the lock that the command holds which has started a trial."""
        return inside(self.path, "logs", f"{name}.claim")

    def exists(self) -> bool:
        """Return whether it has a study."""
        return self._study_path.exists()

    def open(self, *studies: Study) -> None:
        """Make the folder, or add the entries and seeds of the studies to its study.

        Raises: MtkitError as `combined`, before anything is written.
        """
        self.combined(*studies)
        # two commands that add entries at the same time keep both
        with locked(inside(self.path, "study.lock")):
            study = self.combined(*studies)
            write_json(
                self._study_path,
                {
                    "format": FORMAT,
                    "base": dict(study.base),
                    "entries": [{"name": entry.name, "settings": dict(entry.settings)} for entry in study.entries],
                    "settings": study.settings.model_dump(mode="json", exclude={"entries"}),
                },
            )

    def combined(self, *studies: Study) -> Study:
        """Return the folder's study with the entries and seeds of `studies`; write nothing.

        Raises: MtkitError if it is not the folder of a comparison, or two of the studies have other common settings.
        """
        foreign = [name for name in ("runs", "results", "logs", "settings.json") if (self.path / name).exists()]
        if foreign and not self.exists():
            raise MtkitError(
                f"{self.path / foreign[0]} exists, but {self.path} is not the folder of a comparison of this version: "
                "it has no study.json; choose another --output"
            )
        study = reduce(self._added, [self.study(), *studies] if self.exists() else studies)
        _refuse_same_files([entry.name for entry in study.entries])
        return study

    def _added(self, previous: Study, study: Study) -> Study:
        self._refuse(_changed(dict(previous.base), dict(study.base)))
        self._refuse(_search_changes(previous.settings.search, study.settings.search))
        # the caption says of all entries whether they are matched
        self._refuse(differences({"match": previous.settings.match}, {"match": study.settings.match}))
        # one column would have scores of different sides
        self._refuse(differences({"sides": previous.settings.sides}, {"sides": study.settings.sides}))
        entries = {entry.name: entry for entry in previous.entries}
        for entry in study.entries:
            known = entries.setdefault(entry.name, entry)
            self._refuse(differences(dict(known.settings), dict(entry.settings), entry.name))
        if study.settings.search is not None and study.seeds[0] != previous.seeds[0]:
            raise MtkitError(
                f"the comparison in {self.path} searches with seed {previous.seeds[0]}; give that seed first, or "
                "choose another --output"
            )
        seeds = tuple(dict.fromkeys([*previous.seeds, *study.seeds]))
        return Study(study.base, tuple(entries.values()), study.settings.model_copy(update={"seeds": seeds}))

    def study(self) -> Study:
        """Read study.json. Raises: MtkitError if it is damaged or has another version."""
        if self._study_path.exists():
            check_regular(self.path)
        content = self._stored_study()
        try:
            settings = StudySettings.model_validate(content["settings"])
        except ValidationError as error:
            raise MtkitError(f"{self._study_path} is damaged ({explain(error)}); choose another --output") from error
        return Study(content["base"], tuple(Entry(**entry) for entry in content["entries"]), settings)

    def _stored_study(self) -> _Study:
        return read_stored(self._study_path, _Study, "choose another --output", version=FORMAT)

    def add(self, trial: Trial, data: str) -> None:
        """Write the settings of a trial, to be trained on prepared data with the fingerprint `data`.

        Raises: MtkitError if the folder has the trial with other settings or data.
        """
        self.check(trial, data)
        values = asdict(trial)
        content = {"format": FORMAT, "trial": values.pop("name"), **values, "data": data}
        write_json(self._trial_path(trial.name), content)

    def check(self, trial: Trial, data: str) -> None:
        """Raise MtkitError if the folder has the trial with other settings or other prepared data."""
        if self._trial_path(trial.name).exists():
            previous = self.trial(trial.name)
            changed = _changed(previous["recipe"], trial.recipe)
            self._refuse(changed if previous["data"] == data else [*changed, "the prepared data differs"])

    def _refuse(self, changed: Sequence[str]) -> None:
        if changed:
            raise MtkitError(
                f"the comparison in {self.path} was started with other settings ({'; '.join(changed)}); "
                "use the same settings to resume it, or choose another --output"
            )

    def trial(self, name: str) -> dict[str, Any]:
        """Read the settings of a trial. Raises: MtkitError if there is none or it is damaged."""
        advice = "delete it, and the same command writes it again"
        return dict(read_stored(self._trial_path(name), StoredTrial, advice, version=FORMAT))

    def begun(self) -> list[dict[str, Any]]:
        """Read the settings of all trials that were started or are about to be."""
        return [self.trial(path.stem) for path in sorted((self.path / "trials").glob("*.json"))]

    def row(self, name: str) -> dict[str, Any] | None:
        """Read the row of a trial; None if there is none or its file is damaged."""
        path = self._row_path(name)
        return _read(path) if path.exists() else None

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, including failures, in the order of the entries, then of their trials' names."""
        loaded = (_read(path) for path in sorted((self.path / "results").glob("*.json")))
        rows = [row for row in loaded if row is not None]
        if not self._study_path.exists():
            return rows
        order = {entry["name"]: place for place, entry in enumerate(self._stored_study()["entries"])}
        return sorted(rows, key=lambda row: order.get(row["entry"], len(order)))

    def damaged(self) -> list[str]:
        """Return a message for each damaged file of the results, with what is missing and how to compute it again."""
        messages = []
        for path in sorted((self.path / "results").glob("*.json")):
            statistics = self._statistics_path(path.stem)
            if _read(path) is None:
                messages.append(f"{path} is damaged and left out; the command that made it computes it again")
            elif statistics.exists() and not _is_readable(statistics):
                messages.append(
                    f"{statistics} is damaged, so intervals and tests leave it out; delete {path}, and the command "
                    "that made it computes both again"
                )
        return messages

    def statistics(self, name: str) -> dict[str, np.ndarray]:
        """Read the sufficient statistics of a trial's segments: {"test/BLEU": (segments, numbers)}.

        Raises: MtkitError if the file is missing or damaged.
        """
        return {key: tensor.numpy() for key, tensor in read_tensors(self._statistics_path(name)).items()}

    def keep(self, name: str, statistics: Mapping[str, np.ndarray] | None = None, **measured: Any) -> None:
        """Write the row of a trial: its settings and what was measured, and the statistics of its segments."""
        if statistics is not None:
            with writing(self._statistics_path(name)) as temporary:
                write_tensors(temporary, {key: torch.tensor(rows) for key, rows in statistics.items()})
        write_json(self._row_path(name), {**self.trial(name), **measured})

    def fail(self, name: str, reason: str, **measured: Any) -> None:
        """Write why a trial failed; the next run of the comparison tries it again."""
        self.keep(name, failed=" ".join(reason.split()), **measured)

    def prune(self, name: str, curve: Sequence[Mapping[str, Any]]) -> None:
        """Write the row of a search trial that the pruner stopped after the validations of `curve`."""
        best = max(curve, key=lambda point: validation_score({"valid": point}))
        self.keep(name, pruned=True, valid=dict(best), curve=list(curve))

    def forget(self, name: str) -> None:
        """Remove the row of a trial."""
        self._row_path(name).unlink(missing_ok=True)

    def write_rows(self) -> Path:
        """Write results.jsonl, with a line for each trial; return its path."""
        path = inside(self.path, "results.jsonl")
        write_text(path, "".join(f"{json_text(row)}\n" for row in self.rows()))
        return path

    @property
    def _study_path(self) -> Path:
        return inside(self.path, "study.json")

    def _trial_path(self, name: str) -> Path:
        return inside(self.path, "trials", f"{name}.json")

    def _row_path(self, name: str) -> Path:
        return inside(self.path, "results", f"{name}.json")

    def _statistics_path(self, name: str) -> Path:
        return inside(self.path, "results", f"{name}.safetensors")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a results.jsonl. Raises: MtkitError with the line of a damaged row."""
    return list(read_stored_lines(path, STORED_ROW, "write it again with `mtkit compare`"))


def _refuse_same_files(names: Sequence[str]) -> None:
    """Raise MtkitError if the trials of two entries would have the same files: "a/b" and "a-b" are both "a-b" there.

    Some file systems do not distinguish capital letters.
    """
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(slug(name).casefold(), name)) != name:
            raise MtkitError(
                f"the entries {shown(other)} and {shown(name)} differ only in capital letters, or in characters that "
                "file names leave out; give one of them another `name` in a study"
            )


def _changed(previous: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ; data is compared by its fingerprint, because its folder may move."""
    return differences({**previous, "data": None}, {**now, "data": None})


def _search_changes(previous: SearchSettings | None, now: SearchSettings | None) -> list[str]:
    """List the settings of a search that differ; a grid may get more values, another search more trials."""
    before, after = ({} if search is None else search.model_dump(mode="json") for search in (previous, now))
    if not before or not after:
        return ["only one of the two has a search"] if before or after else []
    if (after["trials"] or 0) > (before["trials"] or 0):
        after["trials"] = before["trials"]
    if after["method"] == "grid":
        for key, values in before["settings"].items():
            if all(value in after["settings"].get(key, []) for value in values):
                after["settings"][key] = values
    return differences(before, after, "search")


def _read(path: Path) -> dict[str, Any] | None:
    """Read a row; None if it is damaged, so that it is computed again."""
    try:
        return dict(read_stored(path, STORED_ROW, "it is computed again"))
    except MtkitError:
        return None


def _is_readable(statistics: Path) -> bool:
    try:
        read_tensors(statistics)
    except MtkitError:
        return False
    return True
