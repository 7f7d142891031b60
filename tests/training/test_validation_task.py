"""Validation on a built-in task: exact match takes the place of BLEU."""

from pathlib import Path

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.recipe.data import DataSettings
from mtkit.runs import Run
from mtkit.training.metrics import read_metrics
from tests.training.conftest import run, tiny


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("task") / "copy"
    task = {"name": "copy", "train": 300, "valid": 8, "test": 4, "longest": 8}
    prepare(DataSettings.model_validate({"folder": folder, "task": task}))
    return open_prepared(folder)


def test_exact_match_is_printed_and_chooses_the_best(task: Prepared, tmp_path: Path) -> None:
    lines: list[str] = []
    run(tiny(), task, tmp_path / "run", say=lines.append)
    validations = [line for line in lines if "validation loss" in line]
    assert validations
    assert all(", exact " in line and "BLEU" not in line and "tok:" not in line for line in validations)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"]
    assert all(row["best_by"] == "exact" and row["bleu"] >= 0 for row in rows)
    recipe = Run(tmp_path / "run").recipe
    assert recipe.scoring.metrics == ("exact", "token")
    assert recipe.training.best_by == "exact"
    assert run(tiny(training={"max_updates": 32}), task, tmp_path / "run").trained == 8


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ({"scoring": {"metrics": ["BLEU"]}}, ["BLEU", "exact"]),
        ({"training": {"best_by": "token"}}, ["token"]),
        ({"training": {"best_by": "loss"}}, ["BLEU"]),
    ],
)
def test_settings_of_the_recipe_choose_what_is_printed(
    groups: dict[str, dict[str, object]], shown: list[str], task: Prepared, tmp_path: Path
) -> None:
    lines: list[str] = []
    run(tiny(**groups), task, tmp_path / "run", say=lines.append)
    head = next(line for line in lines if "validation loss" in line)
    assert [name for name in ("BLEU", "exact", "token") if f", {name} " in head] == shown
