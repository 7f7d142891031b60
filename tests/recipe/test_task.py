"""Recipes with a built-in task: its measures are the default."""

from pathlib import Path

import pytest

from mtkit.recipe import load_recipe, make_recipe
from mtkit.recipe.data import DataSettings


@pytest.mark.parametrize("task", ["copy", {"name": "copy", "longest": 9}])
def test_exact_match_is_the_measure_of_tasks(task: object) -> None:
    recipe = make_recipe({"data": {"task": task}})
    assert recipe.scoring.metrics == ("exact", "token")
    assert recipe.training.best_by == "exact"
    assert make_recipe({}).scoring.metrics == ("BLEU", "chrF", "TER")


def test_measures_that_are_set_are_kept() -> None:
    own = {"scoring": {"metrics": ["chrF"]}, "training": {"best_by": "loss"}}
    for recipe in (
        make_recipe({"data": {"task": "copy"}, **own}),
        make_recipe(own).model_copy(update={"data": DataSettings.model_validate({"task": "copy"})}).for_task(),
    ):
        assert recipe.scoring.metrics == ("chrF",)
        assert recipe.training.best_by == "loss"
    assert make_recipe({"data": {"task": "copy"}, "scoring": {"lowercase": True}}).scoring.metrics == ("exact", "token")


def test_prepared_data_of_a_task_gives_a_recipe_its_measures() -> None:
    recipe = make_recipe({}).model_copy(update={"data": DataSettings.model_validate({"task": "copy"})})
    assert recipe.for_task().scoring.metrics == ("exact", "token")
    assert make_recipe(recipe.for_task().model_dump()).for_task() == recipe.for_task()


def test_options_merge_with_a_name_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("data: {task: copy}\n")
    task = load_recipe(path, {"data": {"task": {"seed": 4, "options": {"vocabulary": 9}}}}).data.task
    assert task is not None
    assert (task.name, task.seed, task.options) == ("copy", 4, {"vocabulary": 9})
    task = load_recipe(path, {"data": {"task": "sort"}}).data.task
    assert task is not None
    assert task.name == "sort"
