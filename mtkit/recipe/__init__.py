"""The recipe of an experiment: its settings and the functions that read them."""

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
from mtkit.recipe.settings import DecodingSettings, TrainingSettings

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
