"""What is compared: one recipe for each mechanism, alike in all but the attention."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mtkit.attention import mechanisms
from mtkit.attention.options import OptionValueError
from mtkit.errors import MtkitError
from mtkit.model.build import label_attention
from mtkit.recipe import AttentionSettings, Recipe

ALL = "all"
"""Stands for every mechanism, `full` first."""


def entries(recipe: Recipe, names: Sequence[str], wanted: Collection[str] = ()) -> dict[str, Recipe]:
    """For each mechanism the recipe with it in the roles that its paper gives it, and those options that it has.

    What the recipe says of attention besides its options does not count. The name ALL stands for all of them. `wanted`
    are options that one of the mechanisms must have.

    Raises: MtkitError for a name that is not there, an option that none of them has, a value that a mechanism refuses,
    and a training without an end.
    """
    training = recipe.training
    if not any((training.max_updates, training.max_epochs, training.max_minutes, training.patience)):
        raise MtkitError("the recipe's training has no limit; give --max-updates or --max-minutes")
    if not names:
        raise MtkitError("no mechanism to compare; give their names, as in --attention full,longformer")
    if ALL in names:
        names = ["full", *mechanisms()]
    plain = {name: _with(recipe, name, {}) for name in dict.fromkeys(names)}
    for each in plain.values():
        label_attention(each)
    refused: dict[str, list[MtkitError]] = {}
    found = {}
    for name in plain:
        options = {}
        for key, value in recipe.attention.options.items():
            try:
                label_attention(_with(recipe, name, {key: value}))
            except OptionValueError:  # the mechanism has the option: to leave it out would compare something else
                raise
            except MtkitError as error:
                refused.setdefault(key, []).append(error)
            else:
                options[key] = value
        found[name] = _with(recipe, name, options)
    for key in wanted:
        errors = refused.get(key, [])
        if len(errors) == len(plain):
            # the error with the nearest name says most
            raise max(errors, key=lambda error: "did you mean" in str(error))
    return found


def _with(recipe: Recipe, name: str, options: Mapping[str, Any]) -> Recipe:
    return recipe.model_copy(update={"attention": AttentionSettings(name=name, options=dict(options))})
