"""Set-up of a study: the prepared data of its tasks, and the widths of matched models."""

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from mtkit.data.encode import usable_cores
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.decoding.held_out import held_out
from mtkit.errors import DiffersError, MtkitError, shown
from mtkit.evaluation.metrics import ALL_METRICS
from mtkit.experiments.cost import matched
from mtkit.experiments.folder import Folder, locked
from mtkit.experiments.run import metrics_of
from mtkit.experiments.study import Study, check_limits, trial_recipe
from mtkit.experiments.table import check_columns
from mtkit.experiments.trials import Plan, slug
from mtkit.recipe import merged
from mtkit.storage.files import inside
from mtkit.terminal import ProgressBar, Say, quiet, silent


def set_up(
    study: Study, folder: Folder, *, progress: ProgressBar = silent, say: Say = quiet
) -> tuple[Plan, dict[str | None, str]]:
    """Prepare the data of the study's tasks in the folder, and match the models if the study has `match`.

    Without tasks, the recipe's data must be prepared. Return the plan of the trials, and the fingerprint of each task's
    data.

    Raises: DataError without prepared data; MtkitError for a folder with other common settings, a training without a
    limit, an unknown column, and a model that cannot be matched.
    """
    first = folder.combined(study).entries[0]
    check_limits(study)
    check_columns(study.settings.columns)
    _check_metrics(study)
    tasks: dict[str | None, dict[str, Any]] = {}
    for chosen in study.settings.tasks:
        label = task_label(chosen)
        if label in tasks:
            raise MtkitError(f"two tasks have the label {shown(label)}; give one of them another `label`")
        tasks[label] = _data(chosen, label, folder)
    tasks = tasks or {None: {}}
    sides = {task: trial_recipe(merged(study.base, data), "the study").data for task, data in tasks.items()}
    prepared = {}
    for task, data in sides.items():
        if task is not None:
            say(f"preparing {data.folder}")
            with locked(inside(folder.path, "data", f"{task}.lock")):  # commands on the same folder wait here
                try:
                    prepare(data, workers=usable_cores(), progress=progress)
                except DiffersError as error:
                    advice = f"give the task {task} another `label`, or choose another --output"
                    raise MtkitError(f"{error.what}; {advice}") from error
        prepared[task] = open_prepared(data.folder)
        for name in [*study.settings.sides, *filter(None, (key.partition("@")[2] for key in study.settings.columns))]:
            held_out(prepared[task], name)  # raises for an unknown name
    widths = {}
    if study.settings.match is not None:
        pairs = list(product(prepared.items(), study.entries))
        for (task, side), entry in progress(pairs, "matching", len(pairs)):
            try:
                matched_recipe = matched(study.recipe(entry), study.recipe(first), study.settings.match, side)
            except MtkitError as error:
                raise MtkitError(f"the entry {entry.name}: {error}") from error
            widths[task, entry.name] = matched_recipe.model.feed_forward
    return Plan(study, tasks, widths), {task: side.fingerprint for task, side in prepared.items()}


def data_folders(plan: Plan) -> set[Path]:
    """Return the folders of prepared data that a plan's trials read."""
    return {trial_recipe(trial.recipe, trial.name).data.folder for trial in plan.due([])}


def task_label(task: str | Mapping[str, Any]) -> str:
    """Return the name of a task in tables: its `label`, else "mqar", or "mqar-longest-8" with options."""
    if isinstance(task, str):
        return task
    options = [f"{key}-{value}" for key, value in task.items() if key != "name"]
    return slug(str(task.get("label") or "-".join([str(task.get("name", "task")), *options])), re.UNICODE)


def _check_metrics(study: Study) -> None:
    """Raises: MtkitError for a column of a metric that the comparison does not compute."""
    computed = {name.lower() for name in metrics_of(study.recipe(study.entries[0]))}
    for column in study.settings.columns:
        metric = column.lower().partition("@")[0]
        if metric in map(str.lower, ALL_METRICS) and metric not in computed:
            raise MtkitError(
                f"the column {shown(column)} needs a metric that this comparison does not compute; list it in "
                "scoring.metrics of the recipe, or of `settings` in a study"
            )


def _data(task: str | Mapping[str, Any], label: str, folder: Folder) -> dict[str, Any]:
    settings = {"name": task} if isinstance(task, str) else {key: task[key] for key in task if key != "label"}
    return {"data": {"task": settings, "folder": str(inside(folder.path, "data", label))}}
