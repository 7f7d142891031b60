"""Recipes of a comparison: one per mechanism, which differ only in the attention."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mtkit.attention import mechanisms
from mtkit.attention.options import OptionValueError
from mtkit.errors import MtkitError
from mtkit.model.build import label_attention
from mtkit.recipe import AttentionSettings, Recipe

ALL = "all"
"""Name that selects all mechanisms, `full` first."""


def entries(recipe: Recipe, names: Sequence[str], wanted: Collection[str] = ()) -> dict[str, Recipe]:
    """Return a recipe per mechanism: the mechanism in the roles of its paper, with the recipe's options that it has.

    Of the recipe's attention settings, only the options are used. The name ALL selects all mechanisms. At least one
    mechanism must have each option in `wanted`.

    Raises: MtkitError for an unknown name, an option that no mechanism has, an invalid value of an option, and a
    training without a limit.
    """
    training = recipe.training
    if not any((training.max_updates, training.max_epochs, training.max_minutes, training.patience)):
        raise MtkitError("the recipe's training has no limit; give --max-updates or --max-minutes")
    if not names:
        raise MtkitError("no mechanisms to compare; give their names, as in --attention full,longformer")
    if ALL in names:
        names = ["full", *mechanisms()]
    defaults = {name: _with(recipe, name, {}) for name in dict.fromkeys(names)}
    for entry in defaults.values():
        label_attention(entry)
    refused: dict[str, list[MtkitError]] = {}
    recipes = {}
    for name in defaults:
        options = {}
        for key, value in recipe.attention.options.items():
            try:
                label_attention(_with(recipe, name, {key: value}))
            except OptionValueError:  # the mechanism has the option, so it must not be left out
                raise
            except MtkitError as error:
                refused.setdefault(key, []).append(error)
            else:
                options[key] = value
        recipes[name] = _with(recipe, name, options)
    for key in wanted:
        errors = refused.get(key, [])
        if len(errors) == len(defaults):
            # the error that suggests a name is the most helpful
            raise max(errors, key=lambda error: "did you mean" in str(error))
    return recipes


def _with(recipe: Recipe, name: str, options: Mapping[str, Any]) -> Recipe:
    return recipe.model_copy(update={"attention": AttentionSettings(name=name, options=dict(options))})
