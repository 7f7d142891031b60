"""A model from a recipe."""

from collections.abc import Mapping

import torch

from mtkit.attention import ROLES, mechanisms
from mtkit.attention.registry import find
from mtkit.attention.slots import SLOTS
from mtkit.errors import RecipeError
from mtkit.memory import available_bytes, too_large, weights_within_memory
from mtkit.model.attentions import Choice, choose, describe, label
from mtkit.model.network import Network
from mtkit.model.recurrent import Recurrent
from mtkit.model.transformer import Transformer
from mtkit.recipe import AttentionSettings, ModelSettings, Recipe

SMALLER = "lower model.d_model, model.feed_forward, the layers, model.max_length or data.tokenizer.vocabulary"


def build_model(recipe: Recipe, *, source_vocabulary: int, target_vocabulary: int, tasks: int = 1) -> Network:
    """The recipe's model, freshly initialised from its seed, without touching the global random state.

    `tasks` is the number of tasks, for attentions that are conditioned on one.

    Raises: RecipeError for three-way tying with two vocabularies; MtkitError if the weights do not fit in memory,
    and for attentions that cannot be built.
    """
    _check_memory(recipe.model, source_vocabulary + target_vocabulary)
    if recipe.model.tie == "all" and not recipe.data.tokenizer.joint:
        raise RecipeError(
            "model.tie = all needs one vocabulary for both sides: leave model.tie out, set it to decoder, or prepare "
            "the data without --separate (data.tokenizer.joint: true)"
        )
    # models are built on the CPU, with its generator
    with weights_within_memory(SMALLER), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        chosen = choose(_attention(recipe), _layers(recipe), tasks)
        sizes = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary, "seed": recipe.seed}
        if recipe.model.architecture == "rnn":
            return Recurrent(recipe.model, chosen["cross"][0], **sizes)
        return Transformer(recipe.model, chosen, **sizes)


def choose_attention(recipe: Recipe) -> dict[str, list[Choice]]:
    """The choice of each layer for each role. Raises: MtkitError like `build_model`."""
    return choose(_attention(recipe), _layers(recipe))


def attention_packages(recipe: Recipe) -> dict[str, str]:
    """Other packages whose mechanisms the recipe uses: package and version by the mechanism's name."""
    names: set[str] = set()
    for choice in (choice for choices in choose_attention(recipe).values() for choice in choices):
        slots = [choice.options.get(slot) for slot in SLOTS]
        names |= {choice.name, *(str(slot["name"] if isinstance(slot, Mapping) else slot) for slot in slots)}
    used = [mechanism for mechanism in mechanisms().values() if mechanism.name in names]
    return {mechanism.name: mechanism.package for mechanism in used if mechanism.package is not None}


def describe_attention(recipe: Recipe) -> str:
    """One line on which mechanism has which role. Raises: MtkitError like `build_model`."""
    return describe(_attention(recipe), _layers(recipe))


def label_attention(recipe: Recipe) -> str:
    """A name for a run by its attentions, or rnn. Raises: MtkitError like `build_model`."""
    if recipe.model.architecture == "rnn":
        named = choose_attention(recipe)["cross"][0].name
        return "rnn" if named == "additive" else f"rnn-{named}"
    return label(_attention(recipe), _layers(recipe))


def _check_memory(model: ModelSettings, vocabulary: int) -> None:
    """Raises: MtkitError if the layers' largest matrices and the embeddings do not fit in memory."""
    inner = 3 * model.d_model if model.architecture == "rnn" else model.feed_forward
    layers = 2 * inner * model.d_model * (model.encoder_layers + model.decoder_layers)
    embeddings = model.d_model * (vocabulary // (2 if model.tie == "all" else 1) + model.max_length)
    needed = 4 * (layers + embeddings)
    if needed > available_bytes():
        raise too_large(needed, SMALLER)


def _attention(recipe: Recipe) -> AttentionSettings:
    """The recipe's attentions with the default name; the rnn has only the cross role."""
    settings = recipe.attention
    if settings.name is not None:
        find(settings.name)  # checked even if every role names its own
    if recipe.model.architecture == "transformer":
        return settings if settings.name is not None else settings.model_copy(update={"name": "full"})
    for role in ("encoder", "decoder"):
        if getattr(settings, role) is not None:
            raise RecipeError(f"the rnn only has attention to the source: leave attention.{role} out")
    named = next(name for name in (settings.cross, settings.name, "additive") if name is not None)
    return settings.model_copy(update={"name": "full", "cross": named})


def _layers(recipe: Recipe) -> dict[str, int]:
    model = recipe.model
    if model.architecture == "rnn":
        return {"encoder": 0, "decoder": 0, "cross": 1}
    return dict(zip(ROLES, (model.encoder_layers, model.decoder_layers, model.decoder_layers), strict=True))
