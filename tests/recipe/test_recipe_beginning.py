"""What a training takes over from the run that it begins with."""

from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import RecipeError
from mtkit.recipe import load_recipe


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention": "longformer"}, "attention = 'longformer'"),
        ({"model": "transformer"}, "model = 'transformer'"),
        ({"attention": {"options": "rotary"}}, "attention.options = 'rotary'"),
        ({"attention": ["band"]}, "attention = "),
    ],
)
def test_a_word_in_place_of_a_group_is_named(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    """As it is without such a run."""
    (tmp_path / "recipe.yaml").write_text("model: {d_model: 64}\nattention: {name: band}\n")
    (tmp_path / "run.json").write_text("{}")
    assert load_recipe(None, {"training": {"init_from": str(tmp_path)}}).model.d_model == 64
    with pytest.raises(RecipeError) as alone:
        load_recipe(None, given)
    assert words in str(alone.value)
    with pytest.raises(RecipeError) as begun:
        load_recipe(None, {"training": {"init_from": str(tmp_path)}, **given})
    assert str(begun.value) == str(alone.value)


@pytest.mark.parametrize(
    ("given", "attention"),
    [
        ({}, {"name": "band", "options": {"window_radius": 3, "positions": "rotary"}}),
        ({"options": {"window_radius": 5}}, {"name": "band", "options": {"window_radius": 5, "positions": "rotary"}}),
        ({"encoder": "full"}, {"name": None, "encoder": "full", "options": {}}),
    ],
)
def test_options_lie_over_those_of_the_run_unless_a_mechanism_is_named(
    given: dict[str, Any], attention: dict[str, Any], tmp_path: Path
) -> None:
    options = "options: {window_radius: 3, positions: rotary}"
    (tmp_path / "recipe.yaml").write_text(f"attention: {{name: band, {options}}}\n")
    (tmp_path / "run.json").write_text("{}")
    found = load_recipe(None, {"training": {"init_from": str(tmp_path)}, "attention": given}).attention
    assert {name: getattr(found, name) for name in attention} == attention
