"""The settings that `mtkit translate` decodes by, from its options and the run's recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.recipe import Recipe
    from mtkit.runs import Run


def given_settings(**settings: Any) -> dict[str, Any]:
    """Those decoding settings that the command line has; --beam without --method selects beam search."""
    from mtkit.recipe.decoding import with_method

    return with_method({key: value for key, value in settings.items() if value is not None})


def folder_of(recipe: "Recipe", run: "Run") -> Path:
    """The prepared data of a recipe, or the run's where the recipe says nothing of data."""
    return recipe.data.folder if "data" in recipe.model_fields_set else run.recipe.data.folder


def recipe_of(run: "Run", path: Path | None, given: dict[str, Any]) -> "Recipe":
    """The recipe at `path`, or else the run's, with the decoding settings given on the command line."""
    from mtkit.recipe import load_recipe, make_recipe, merged

    overrides = {"decoding": given}
    recipe = load_recipe(path, overrides) if path else make_recipe(merged(run.recipe.model_dump(), overrides))
    if idle := recipe.decoding.without_effect(given):
        option, method = idle[0].replace("_", "-"), idle[1]
        raise MtkitError(f"--{option} has no effect with --method {recipe.decoding.method}; add --method {method}")
    return recipe
