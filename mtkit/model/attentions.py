"""The attention of each layer: from a recipe's settings to built sub-layers."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from mtkit.attention import ROLES, Attention, build
from mtkit.attention.registry import Mechanism, check_options, check_role, check_slots, find
from mtkit.attention.slots import SLOTS
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.recipe import AttentionSettings, ModelSettings


@dataclass(frozen=True)
class Choice:
    """One layer's mechanism with its options and slots."""

    name: str
    options: Mapping[str, Any]


def choose(settings: AttentionSettings, layers: Mapping[str, int], tasks: int = 1) -> dict[str, list[Choice]]:
    """The choice of each layer for each role, from the recipe's names and options.

    An option of one role overrides the option of all roles. A mechanism's option `tasks` defaults to the number of
    tasks.

    Raises: MtkitError for an unknown name, role or option, for a list whose length is not the number of layers, and for
    an option `tasks` that is too small.
    """
    names = {role: _names(settings, role, layers[role]) for role in ROLES}
    options: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    for key, value in sorted(settings.options.items(), key=lambda item: "." in item[0]):
        role, dot, option = key.rpartition(".")
        if dot and role not in ROLES:
            raise MtkitError(f"no role {shown(role)} in attention option {shown(key)}{did_you_mean(role, list(ROLES))}")
        for chosen in _roles_for(option, {role: names[role]} if dot else names):
            options[chosen][option] = value
    return {role: [_choice(find(name), options[role], tasks) for name in names[role]] for role in ROLES}


def describe(settings: AttentionSettings, layers: Mapping[str, int]) -> str:
    """One line on which mechanism has which role: "encoder longformer, decoder longformer, cross full"."""
    chosen = choose(settings, layers).items()
    return ", ".join(f"{role} {' + '.join(_short(choices))}" for role, choices in chosen if choices)


def label(settings: AttentionSettings, layers: Mapping[str, int]) -> str:
    """A name for a run with these attentions: the mechanism's name, or "linformer-average-full" by role."""
    chosen = choose(settings, layers).values()
    if (settings.encoder, settings.decoder, settings.cross) == (None, None, None):
        return "full" if settings.name is None else settings.name
    return "-".join("+".join(name for name, _ in groupby(choice.name for choice in choices)) for choices in chosen)


def build_stack(
    role: str,
    choices: list[Choice],
    model: ModelSettings,
    seed: int,
    shared: MutableMapping[Any, nn.Module] | None = None,
) -> list[Attention]:
    """The attention of each layer; adjacent layers with the same mechanism and options are one run of layers.

    `shared` holds the modules that attentions of a model share: pass the same one for all its stacks.
    """
    shared = {} if shared is None else shared
    built: list[Attention] = []
    for choice, run in groupby(choices):
        layers = len(list(run))
        built += [
            build_attention(choice, role, model, seed, layer=layer, layers=layers, shared=shared)
            for layer in range(layers)
        ]
    return built


def build_attention(choice: Choice, role: str, model: ModelSettings, seed: int, **site: Any) -> Attention:
    """One attention in a model of these settings; `site` has further arguments of `mtkit.attention.build`."""
    return build(
        choice.name,
        role=role,
        d_model=model.d_model,
        heads=model.heads,
        max_length=model.max_length,
        dropout=model.attention_dropout,
        seed=seed,
        **site,
        **choice.options,
    )


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
    # target and source positions are not comparable: positions apply to the cross role only if it is named
    candidates = [role for role in names if len(names) == 1 or (option, role) != ("positions", "cross")]
    applicable = [role for role in candidates if any(option in (*SLOTS, *find(name).options) for name in names[role])]
    if not applicable:
        used = {name: find(name) for listed in names.values() for name in listed}
        known = sorted({*SLOTS, *(declared for mechanism in used.values() for declared in mechanism.options)})
        who = f"none of {', '.join(used)} has an" if len(used) > 1 else f"'{''.join(used)}' has no"
        if not any(names[role] for role in candidates):
            who = f"there is no {' or '.join(candidates)} attention to have an"
        hint = did_you_mean(option, known)
        raise MtkitError(f"{who} attention option {shown(option)}{hint}; known: {', '.join(known)}")
    return applicable


def _choice(mechanism: Mechanism, options: Mapping[str, Any], tasks: int) -> Choice:
    """This mechanism with its options among a role's; the layers of one role may have different mechanisms."""
    slots = {key: value for key, value in options.items() if key in SLOTS}
    chosen = {key: value for key, value in options.items() if key in mechanism.options and key not in SLOTS}
    check_options(mechanism, chosen)
    check_slots(mechanism, slots)
    if "tasks" in mechanism.options and chosen.setdefault("tasks", tasks) < tasks:
        raise MtkitError(
            f"attention '{mechanism.name}' has tasks = {chosen['tasks']}, and there are {tasks} directions"
        )
    return Choice(mechanism.name, {**chosen, **slots})


def _short(choices: list[Choice]) -> list[str]:
    names = [choice.name for choice in choices]
    several = len(set(names)) > 1
    return [f"{name} x {len(list(run))}" if several else name for name, run in groupby(names)]
