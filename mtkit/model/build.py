"""A model from a recipe."""

import torch

from mtkit.attention import ROLES
from mtkit.errors import RecipeError
from mtkit.model.attentions import choose, describe, label
from mtkit.model.transformer import Transformer
from mtkit.recipe import Recipe


def build_model(recipe: Recipe, *, source_vocabulary: int, target_vocabulary: int, tasks: int = 1) -> Transformer:
    """The recipe's model, freshly initialised from its seed, without touching the global random state.

    `tasks` is how many tasks the model is given, for attentions that are conditioned on one.

    Raises: RecipeError where three-way tying meets two vocabularies; MtkitError for attentions that cannot be built.
    """
    if recipe.model.tie == "all" and not recipe.data.tokenizer.joint:
        raise RecipeError("model.tie = all needs one vocabulary: set data.tokenizer.joint or take model.tie = decoder")
    with torch.random.fork_rng(devices=[]):  # models are built on the CPU; its generator alone draws
        torch.default_generator.manual_seed(recipe.seed)
        return Transformer(
            recipe.model,
            choose(recipe.attention, _layers(recipe), tasks),
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            seed=recipe.seed,
        )


def describe_attention(recipe: Recipe) -> str:
    """One line saying which mechanism plays which role. Raises: MtkitError as `build_model` would."""
    return describe(recipe.attention, _layers(recipe))


def label_attention(recipe: Recipe) -> str:
    """A name for a run by its attentions. Raises: MtkitError as `build_model` would."""
    return label(recipe.attention, _layers(recipe))


def _layers(recipe: Recipe) -> dict[str, int]:
    model = recipe.model
    return dict(zip(ROLES, (model.encoder_layers, model.decoder_layers, model.decoder_layers), strict=True))
