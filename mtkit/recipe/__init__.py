"""The recipe of an experiment: its settings, and how they are read; what other rooms use of it is here."""

from mtkit.recipe.decoding import DecodingSettings
from mtkit.recipe.recipe import (
    AttentionSettings,
    ModelSettings,
    Recipe,
    differences,
    load_recipe,
    make_recipe,
    merged,
    overridden,
)
from mtkit.recipe.training import TrainingSettings

__all__ = [
    "AttentionSettings",
    "DecodingSettings",
    "ModelSettings",
    "Recipe",
    "TrainingSettings",
    "differences",
    "load_recipe",
    "make_recipe",
    "merged",
    "overridden",
]
