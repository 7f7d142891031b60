from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.folder import Folder
from mtkit.experiments.setup import set_up, task_label
from mtkit.experiments.study import make_study

SHORT = {"name": "copy", "train": 40, "valid": 4, "test": 4}
SETTINGS = {"training": {"max_updates": 1}}


def test_a_task_is_named_by_its_label() -> None:
    assert task_label("copy") == "copy"
    assert task_label({"name": "copy", "longest": 8}) == "copy-longest-8"
    assert task_label({"name": "copy", "longest": 8, "label": "short copy"}) == "short-copy"
    assert task_label({"name": "copy", "label": "短い コピー"}) == "短い-コピー"
    assert len(task_label({"name": "copy", "label": "短い" * 50}).encode()) <= 100


def test_the_label_is_no_setting_of_the_task(tmp_path: Path) -> None:
    study = make_study({"settings": SETTINGS, "entries": ["full"], "tasks": [{**SHORT, "label": "short"}, SHORT]})
    plan, data = set_up(study, Folder(tmp_path))
    assert list(data) == ["short", "copy-train-40-valid-4-test-4"]
    assert len(set(data.values())) == 1
    assert plan.due([])[0].name == "short.full.seed-1"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sides": ["tset"]}, "no test side 'tset'.*did you mean 'test'"),
        ({"columns": ["exact@tset"]}, "no test side 'tset'"),
        ({"columns": ["TER"]}, r"the column 'TER' needs a metric.* scoring\.metrics"),
    ],
)
def test_what_has_no_scores_is_refused_before_any_training(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    study = make_study({"settings": SETTINGS, "entries": ["full"], "tasks": [SHORT], **more})
    with pytest.raises(MtkitError, match=message):
        set_up(study, Folder(tmp_path))
    scored = {**SETTINGS, "scoring": {"metrics": ["BLEU", "TER"]}}
    set_up(
        make_study({"settings": scored, "entries": ["full"], "tasks": [SHORT], "columns": ["ter"]}), Folder(tmp_path)
    )


def test_another_task_of_the_same_label_is_refused(tmp_path: Path) -> None:
    for train in (40, 50):
        tasks = [{**SHORT, "train": train, "label": "short"}]
        study = make_study({"settings": SETTINGS, "entries": ["full"], "tasks": tasks})
        if train == 40:
            set_up(study, Folder(tmp_path))
    with pytest.raises(MtkitError, match="give the task short another `label`, or choose another --output"):
        set_up(study, Folder(tmp_path))


def test_the_folder_of_something_else_is_refused_before_data_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(MtkitError, match="not the folder of a comparison"):
        set_up(make_study({"settings": SETTINGS, "entries": ["full"], "tasks": [SHORT]}), Folder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_two_tasks_with_one_label_are_refused(tmp_path: Path) -> None:
    study = make_study({"settings": SETTINGS, "entries": ["full"], "tasks": [SHORT, {**SHORT, "label": "a"}] * 2})
    with pytest.raises(MtkitError, match="two tasks have the label 'copy-train-40-valid-4-test-4'"):
        set_up(study, Folder(tmp_path))
