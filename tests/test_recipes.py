"""The recipes that come with mtkit can be read, and say at their head how to run them and what they reached."""

from pathlib import Path

import pytest

from mtkit.model.build import build_model
from mtkit.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_model_and_says_what_it_reached(path: Path) -> None:
    recipe = load_recipe(path)
    assert build_model(recipe, source_vocabulary=64, target_vocabulary=64)
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"mtkit train --recipe recipes/{path.name}" in line for line in head)
    assert any("BLEU" in line for line in head)
