"""A model from a recipe."""

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtkit.attention import ROLES
from mtkit.attention.construction import check_heads, check_options, check_slots
from mtkit.attention.registry import Mechanism, check_role, check_slot_role, find, named_slot, names_of_packages
from mtkit.attention.slots import SLOT_ROLES, SLOTS
from mtkit.errors import MtkitError, RecipeError, did_you_mean, shown
from mtkit.memory import available_bytes, too_large, weights_within_memory
from mtkit.model.network import Choice, Network
from mtkit.model.recurrent import Recurrent
from mtkit.model.transformer import Transformer
from mtkit.recipe import AttentionSettings, ModelSettings, Recipe

BY_ROLE = tuple(f"{role}." for role in ROLES)
"""Beginnings of options for one role."""

SMALLER = "lower model.d_model, model.feed_forward, the layers, model.max_length or data.tokenizer.vocabulary"


DRAWS = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}
"""Functions that fill a tensor with random numbers, and that a `TorchFunctionMode` sees."""


class _Undrawn(TorchFunctionMode):
    """Context in which parameters get no random numbers, because weights from a file replace all of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = kwargs.get("tensor", args[0] if args else None)  # functions of nn.init pass it by its name
        if func in DRAWS and isinstance(filled, nn.Parameter):
            return filled
        return func(*args, **kwargs)


def build_model(
    recipe: Recipe, *, source_vocabulary: int, target_vocabulary: int, tasks: int = 1, drawn: bool = True
) -> Network:
    """The recipe's model, freshly initialised from its seed, without touching the global random state.

    `tasks` is the number of tasks, for attentions that are conditioned on one. Parameters that would be drawn are
    undefined unless `drawn`.

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
    with weights_within_memory(SMALLER), torch.random.fork_rng(devices=[]), nullcontext() if drawn else _Undrawn():
        torch.default_generator.manual_seed(recipe.seed)
        chosen = choose(_attention(recipe), _layers(recipe), tasks)
        sizes = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary, "seed": recipe.seed}
        if recipe.model.architecture == "rnn":
            return Recurrent(recipe.model, chosen["cross"][0], **sizes)
        return Transformer(recipe.model, chosen, **sizes)


def choose_attention(recipe: Recipe) -> dict[str, list[Choice]]:
    """The choice of each layer for each role. Raises: MtkitError like `build_model`."""
    chosen = choose(_attention(recipe), _layers(recipe))
    for choice in (choice for choices in chosen.values() for choice in choices):
        check_heads(find(choice.name), recipe.model.heads)
    return chosen


def attention_packages(recipe: Recipe) -> dict[str, str]:
    """Other packages whose mechanisms the recipe uses: package and version by the mechanism's name."""
    names: set[str] = set()
    for choice in (choice for choices in choose_attention(recipe).values() for choice in choices):
        slots = [value for key, value in choice.options.items() if key.rpartition(".")[2] in SLOTS]
        names |= {choice.name, *(kind.name for kind, _ in find(choice.name).kinds)}
        names |= {str(slot["name"] if isinstance(slot, Mapping) else slot) for slot in slots}
    packages = {name: find(name).package for name in sorted(names & names_of_packages())}
    return {name: package for name, package in packages.items() if package is not None}


def describe_attention(recipe: Recipe) -> str:
    """The mechanism of each role: "encoder longformer, decoder longformer, cross full"."""
    described = []
    for role, choices in choose_attention(recipe).items():
        runs = [(name, len(list(run))) for name, run in groupby(choice.name for choice in choices)]
        several = len({name for name, _ in runs}) > 1
        if choices:
            described.append(f"{role} {' + '.join(f'{name} x {count}' if several else name for name, count in runs)}")
    return ", ".join(described)


def label_attention(recipe: Recipe) -> str:
    """A name for a run by its attentions: "rnn", its mechanism's name, or "linformer-average-full" by role."""
    chosen, settings = choose_attention(recipe), recipe.attention
    if recipe.model.architecture == "rnn":
        name = _label(chosen["cross"][0].name)
        return "rnn" if name == "additive" else f"rnn-{name}"
    if (settings.encoder, settings.decoder, settings.cross) == (None, None, None):
        return "full" if settings.name is None else _label(settings.name)
    runs = (groupby(choice.name for choice in choices) for choices in chosen.values())
    return "-".join("+".join(_label(name) for name, _ in run) for run in runs)


def _label(name: str) -> str:
    """A mechanism's name in a run's name: "full-4+band-4" for "full:4+band:4", because colons name hosts and drives."""
    return find(name).name.replace(":", "-")


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


def choose(settings: AttentionSettings, layers: Mapping[str, int], tasks: int = 1) -> dict[str, list[Choice]]:
    """The choice of each layer for each role, from the recipe's names and options.

    An option of one role overrides the option of all roles. An option of one kind of heads (`band.window_radius`)
    overrides the option of all kinds. A mechanism's option `tasks` defaults to the number of tasks.

    Raises: MtkitError for an unknown name, role or option, for a list whose length is not the number of layers, and for
    an option `tasks` that is too small.
    """
    names = {role: _names(settings, role, layers[role]) for role in ROLES}
    options: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    kinds = {kind.name for listed in names.values() for name in listed for kind, _ in find(name).kinds}
    for key, value in sorted(settings.options.items(), key=lambda item: item[0].startswith(BY_ROLE)):
        role, dot, option = key.partition(".") if key.startswith(BY_ROLE) else ("", "", key)
        if "." in option and option.partition(".")[0] not in kinds:
            role = option.partition(".")[0]
            known = [*ROLES, *sorted(kinds)]
            raise MtkitError(
                f"no role {shown(role)} in attention option {shown(key)}{did_you_mean(role, known)}; "
                f"there are: {', '.join(known)}"
            )
        for chosen in _roles_for(option, {role: names[role]} if dot else names):
            options[chosen][option] = value
    return {role: [_choice(find(name), role, options[role], tasks) for name in names[role]] for role in ROLES}


def _names(settings: AttentionSettings, role: str, layers: int) -> list[str]:
    names: str | list[str] | None = getattr(settings, role)
    if names is None:
        names = "full" if settings.name is None else settings.name
        names = names if role in find(names).published else "full"
    if isinstance(names, str):
        names = [names] * layers
    if len(names) != layers:
        raise MtkitError(f"attention.{role} lists {len(names)} mechanisms for {layers} layers; give one per layer")
    for name in names:
        check_role(find(name), role)
    return names


def _roles_for(option: str, names: Mapping[str, list[str]]) -> list[str]:
    """The roles of `names` that an option applies to: their mechanism has it, or it is a slot and they have layers."""
    slot = option.rpartition(".")[2]
    candidates = [role for role in names if len(names) == 1 or role in SLOT_ROLES.get(slot, ROLES)]
    applicable = [role for role in candidates if any(option in (*SLOTS, *find(name).options) for name in names[role])]
    if not applicable:
        used = {name: find(name) for listed in names.values() for name in listed}
        known = sorted({*SLOTS, *(declared for mechanism in used.values() for declared in mechanism.options)})
        who = f"none of {', '.join(used)} has an" if len(used) > 1 else f"'{''.join(used)}' has no"
        if not any(names[role] for role in candidates):
            who = f"there is no {' or '.join(candidates)} attention to have an"
        hint = "" if option in known else did_you_mean(option, known)
        raise MtkitError(f"{who} attention option {shown(option)}{hint}; known: {', '.join(known)}")
    return applicable


def _choice(mechanism: Mechanism, role: str, options: Mapping[str, Any], tasks: int) -> Choice:
    """This mechanism with its options among a role's; the layers of one role may have different mechanisms."""
    slots = {key: value for key, value in options.items() if key in SLOTS}
    chosen = {key: value for key, value in options.items() if key in mechanism.options and key not in SLOTS}
    check_options(mechanism, chosen)
    check_slots(mechanism, slots)
    for key, value in (chosen | slots).items():
        if value is not None and (slot := key.rpartition(".")[2]) in SLOTS:
            check_slot_role(slot, named_slot(slot, value)[0], role)
    if "tasks" in mechanism.options and chosen.setdefault("tasks", tasks) < tasks:
        raise MtkitError(
            f"attention '{mechanism.name}' has tasks = {chosen['tasks']}, and there are {tasks} directions"
        )
    return Choice(mechanism.name, {**chosen, **slots})
