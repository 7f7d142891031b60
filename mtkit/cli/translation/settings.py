"""The settings that `mtkit translate` decodes by, from its options and the run's recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.recipe import Recipe
    from mtkit.runs import Run

ONLY_WITH = {
    "beam": ("beam", "coverage_penalty"),
    "sample": ("temperature", "top_k", "top_p", "seed"),
}
"""Settings that say nothing with another method."""


def recipe_of(run: "Run", path: Path | None, given: dict[str, Any]) -> "Recipe":
    """The recipe at `path`, or else the run's, with the decoding settings given on the command line."""
    from mtkit.recipe import load_recipe, make_recipe, merged

    overrides = {"decoding": given}
    recipe = load_recipe(path, overrides) if path else make_recipe(merged(run.recipe.model_dump(), overrides))
    for method, settings in ONLY_WITH.items():
        for setting in settings:
            if setting in given and recipe.decoding.method != method:
                option = setting.replace("_", "-")
                raise MtkitError(
                    f"--{option} has no effect with --method {recipe.decoding.method}; add --method {method}"
                )
    return recipe
