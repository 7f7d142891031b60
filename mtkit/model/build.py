"""A model from a recipe."""

import torch

from mtkit.allocation import in_words, machine_bytes
from mtkit.attention import ROLES
from mtkit.errors import RecipeError
from mtkit.model.attentions import Choice, choose, describe, label
from mtkit.model.transformer import Transformer
from mtkit.recipe import ModelSettings, Recipe


def build_model(recipe: Recipe, *, source_vocabulary: int, target_vocabulary: int, tasks: int = 1) -> Transformer:
    """The recipe's model, freshly initialised from its seed, without touching the global random state.

    `tasks` is how many tasks the model is given, for attentions that are conditioned on one.

    Raises: RecipeError where three-way tying meets two vocabularies, or the memory cannot hold the weights; MtkitError
    for attentions that cannot be built.
    """
    _check_memory(recipe.model, source_vocabulary + target_vocabulary)
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


def choose_attention(recipe: Recipe) -> dict[str, list[Choice]]:
    """For each role the choice of each layer. Raises: MtkitError as `build_model` would."""
    return choose(recipe.attention, _layers(recipe))


def describe_attention(recipe: Recipe) -> str:
    """One line saying which mechanism plays which role. Raises: MtkitError as `build_model` would."""
    return describe(recipe.attention, _layers(recipe))


def label_attention(recipe: Recipe) -> str:
    """A name for a run by its attentions. Raises: MtkitError as `build_model` would."""
    return label(recipe.attention, _layers(recipe))


def _check_memory(model: ModelSettings, vocabulary: int) -> None:
    """Raises: RecipeError where the feed-forward sub-layers and embeddings alone are more than this machine holds."""
    layers = 2 * model.feed_forward * model.d_model * (model.encoder_layers + model.decoder_layers)
    embeddings = model.d_model * (vocabulary // (2 if model.tie == "all" else 1) + model.max_length)
    needed = 4 * (layers + embeddings)
    if needed > machine_bytes():
        raise RecipeError(
            f"the model's weights would take {in_words(needed)} of memory or more, and this machine has "
            f"{in_words(machine_bytes())}: lower model.d_model, model.feed_forward, the layers, model.max_length or "
            "data.tokenizer.vocabulary"
        )


def _layers(recipe: Recipe) -> dict[str, int]:
    model = recipe.model
    return dict(zip(ROLES, (model.encoder_layers, model.decoder_layers, model.decoder_layers), strict=True))
