"""Results of other comparisons' folders, joined into one; and one row repeated, to see whether its scores come back."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtkit.data.encode import usable_cores
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, MtkitError
from mtkit.experiments.children import Children
from mtkit.experiments.compare import Show, compare
from mtkit.experiments.entries import Entry
from mtkit.experiments.folder import Folder, read_rows
from mtkit.experiments.rows import TRIAL_KEYS, is_measured
from mtkit.experiments.study import Study, StudySettings, trial_recipe, with_point
from mtkit.experiments.trials import Trial
from mtkit.recipe import differences, merged
from mtkit.recipe.settings import LIMITS
from mtkit.storage.files import inside, write_json


def join(folder: Folder, others: Sequence[Folder | Path], study: Study | None = None) -> tuple[int, int]:
    """Copy the rows of other folders, with their trials and statistics, or of results.jsonl files, which have none.

    Runs stay in their folders. Return the number of copied rows, and the number of trials that the folder had already:
    their rows are kept as they are, except that a failure is replaced. `study` is the one that the folder gets next.

    Raises: MtkitError if rows or the study have other settings, before anything is copied, and for a file if the
    folder has no study.
    """
    rows_to_join = [(other, row) for other in others for row in _rows(other)]
    if not rows_to_join:
        names = ", ".join(str(_path(other)) for other in others)
        raise MtkitError(f"{names}: no results to join; give a folder of `mtkit compare`, or a results.jsonl")
    for other, row in rows_to_join:
        if isinstance(other, Path) and not folder.exists():
            raise MtkitError(f"{folder.path} has no study for the rows of {other}; give --study or --attention too")
        if inside(folder.path, "trials", f"{row['trial']}.json").exists():
            keys = ("trial", "entry", "task", "seed", "stage", "point", "recipe")
            folder.check(Trial(*(row[key] for key in keys)), row["data"])
        if isinstance(other, Path):
            _check_settings(folder.study(), row, other)
    _check_data(folder, rows_to_join)
    if studies := [other.study() for other in others if isinstance(other, Folder)]:
        first = folder.study() if folder.exists() else studies[0]  # the columns of its table stay as they are
        kept = {"columns": first.settings.columns}
        if study is not None:
            folder.combined(*studies, study)
        folder.open(*(replace(other, settings=other.settings.model_copy(update=kept)) for other in studies))
    copied = 0
    for other, row in rows_to_join:
        name = row["trial"]
        mine = folder.row(name)
        if mine is not None and "failed" not in mine:
            continue
        copied += 1
        write_json(inside(folder.path, "trials", f"{name}.json"), {key: row[key] for key in TRIAL_KEYS})
        statistics = inside(_path(other), "results", f"{name}.safetensors")
        if isinstance(other, Folder) and statistics.exists():
            target = inside(folder.path, "results", statistics.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(statistics, target)
        write_json(inside(folder.path, "results", f"{name}.json"), row)
    return copied, len(rows_to_join) - copied


def _check_settings(study: Study, row: Mapping[str, Any], path: Path) -> None:
    """Raises: MtkitError if the study has the row's entry with other settings."""
    for entry in study.entries:
        if entry.name == row["entry"]:
            expected = with_point(merged(study.base, entry.settings), row["point"])
            planned, trained = (_shared(settings, study, row["stage"]) for settings in (expected, row["recipe"]))
            if changed := differences(planned, trained):
                raise MtkitError(
                    f"{path}: {row['trial']} was trained with other settings ({'; '.join(changed)}) than the study in "
                    "--output has; join it to a comparison with its settings"
                )


def _shared(settings: Mapping[str, Any], study: Study, stage: str) -> dict[str, Any]:
    """Return the nested settings without what differs between the trials of an entry."""
    kept = {key: value for key, value in settings.items() if key not in ("data", "seed")}
    if study.settings.match is not None:
        kept["model"] = {key: value for key, value in (kept.get("model") or {}).items() if key != "feed_forward"}
    if stage == "search":  # its limits are a share of the budget
        kept["training"] = {key: value for key, value in (kept.get("training") or {}).items() if key not in LIMITS}
    return kept


def _check_data(folder: Folder, rows: Sequence[tuple[Folder | Path, Mapping[str, Any]]]) -> None:
    """Raises: MtkitError if rows of one task were trained on different data."""
    known = {row["task"]: (row["data"], folder.path) for row in folder.begun()}
    for other, row in rows:
        data, place = known.setdefault(row["task"], (row["data"], _path(other)))
        if row["data"] != data:
            raise MtkitError(
                f"{_path(other)}: {row['trial']} was trained on other prepared data than the rows in {place}; "
                "join it to another --output"
            )


def _rows(other: Folder | Path) -> list[dict[str, Any]]:
    return other.rows() if isinstance(other, Folder) else read_rows(other)


def _path(other: Folder | Path) -> Path:
    return other.path if isinstance(other, Folder) else other


@dataclass(frozen=True)
class Reproduced:
    """A row that was computed again."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    earlier: bool = False
    """Whether an earlier call computed it, so that this one did not."""

    @property
    def differences(self) -> list[str]:
        """The numbers that did not come back, as "test BLEU: 85.12 -> 85.10"."""
        lines = []
        for side, scores in self.before["scores"].items():
            for metric, score in scores.items():
                new = self.after["scores"].get(side, {}).get(metric, {}).get("value")
                if new != score["value"]:
                    lines.append(f"{side} {metric}: {score['value']} -> {new}")
        for name in ("parameters", "flops_per_token"):
            if self.before.get(name) != self.after.get(name):
                lines.append(f"{name}: {self.before.get(name)} -> {self.after.get(name)}")
        return lines

    @property
    def circumstances(self) -> list[str]:
        """Return the differences between two computations that may change rounding: "torch: 2.12.0 -> 2.13.0"."""
        names = ("hardware", "threads", "torch", "mtkit")
        pairs = [(name, self.before.get(name), self.after.get(name)) for name in names]
        pairs.append(("precision", *(row["training"].get("precision") for row in (self.before, self.after))))
        return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def reproduce(
    rows_file: Path, number: int, folder: Folder, *, device: str, threads: int, show: Show
) -> Reproduced | int:
    """Compute row `number` (from 1) of a results.jsonl again in a new folder; return it, or the signal that stopped it.

    If the folder has the row, it is returned as it is. The data is prepared in the folder if the row's own is not
    there. A training limited by minutes stops after the row's updates.

    Raises: MtkitError if there is no such row, its data is another now, or the trial fails.
    """
    rows = read_rows(rows_file)
    if not 1 <= number <= len(rows):
        raise MtkitError(f"{rows_file} has no row {number}; it has rows 1 to {len(rows)}")
    row = rows[number - 1]
    if "failed" in row:
        raise MtkitError(f"row {number} of {rows_file} has no scores: the trial failed ({row['failed']})")
    if not is_measured(row):
        raise MtkitError(f"row {number} of {rows_file} has no scores: the pruner stopped the trial early")
    settings: dict[str, Any] = dict(row["recipe"])
    if trial_recipe(settings, f"{rows_file}, row {number}").training.max_minutes:
        updates = {"max_minutes": None, "max_updates": row["training"]["updates"]}
        settings = merged(settings, {"training": updates})
    settings = _with_data(settings, row["data"], folder)
    trial = Trial(row["trial"], row["entry"], row["task"], row["seed"], row["stage"], row["point"], settings)
    study = StudySettings(sides=tuple(row["scores"]), entries=(row["entry"],), seeds=(row["seed"],))
    folder.open(Study({}, (Entry(row["entry"], {}),), study))
    known = folder.row(trial.name)
    with Children(folder, device, threads) as children:
        stopped = compare(
            folder, _OneTrial(trial), {row["task"]: row["data"]}, children, show=show, done=lambda _: None
        )
    if stopped is not None:
        return stopped
    after = folder.row(trial.name)
    assert after is not None
    if "failed" in after:
        raise MtkitError(f"row {number} of {rows_file} cannot be computed again: {after['failed']}")
    return Reproduced(row, after, earlier=after == known)


@dataclass(frozen=True)
class _OneTrial:
    """A plan of one trial."""

    trial: Trial

    def due(self, rows: Sequence[Mapping[str, Any]], begun: Sequence[Mapping[str, Any]] = ()) -> list[Trial]:
        return [self.trial]


def _with_data(settings: dict[str, Any], fingerprint: str, folder: Folder) -> dict[str, Any]:
    """Return the settings with a folder of prepared data that has this fingerprint; prepare it if necessary."""
    data = trial_recipe(settings, "the row").data
    try:
        if open_prepared(data.folder).fingerprint == fingerprint:
            return settings
    except DataError:
        pass  # the folder is on another machine, or is gone
    place = inside(folder.path, "data")
    settings = merged(settings, {"data": {"folder": str(place)}})
    prepare(trial_recipe(settings, "the row").data, workers=usable_cores())
    if open_prepared(place).fingerprint != fingerprint:
        raise MtkitError(
            f"the data of the row cannot be prepared again: {place} differs from it; the corpora or the versions of "
            "mtkit and sentencepiece have changed"
        )
    return settings
