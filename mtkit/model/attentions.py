"""Which attention stands in which layer: from a recipe's words to built sub-layers."""

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
    """One mechanism with its options and slots, as one layer uses it."""

    name: str
    options: Mapping[str, Any]


def choose(settings: AttentionSettings, layers: Mapping[str, int], tasks: int = 1) -> dict[str, list[Choice]]:
    """For each role the choice of each layer, from the recipe's names and options.

    What is set for one role holds there, whatever is set for all. A mechanism with an option `tasks` gets the number of
    tasks where the recipe does not set that option.

    Raises: MtkitError for a name, role or option that is not there, for a list of another length than the layers, and
    for fewer tasks than there are.
    """
    names = {role: _names(settings, role, layers[role]) for role in ROLES}
    options: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    for key, value in sorted(settings.options.items(), key=lambda item: "." in item[0]):
        role, dot, option = key.rpartition(".")
        if dot and role not in ROLES:
            raise MtkitError(f"no role {shown(role)} in attention option {shown(key)}{did_you_mean(role, list(ROLES))}")
        for each in _roles_for(option, {role: names[role]} if dot else names):
            options[each][option] = value
    return {role: [_choice(find(name), options[role], tasks) for name in names[role]] for role in ROLES}


def describe(settings: AttentionSettings, layers: Mapping[str, int]) -> str:
    """One line saying which mechanism went where: "encoder longformer, decoder longformer, cross full"."""
    chosen = choose(settings, layers).items()
    return ", ".join(f"{role} {' + '.join(_short(choices))}" for role, choices in chosen if choices)


def label(settings: AttentionSettings, layers: Mapping[str, int]) -> str:
    """A name for a run with these attentions: that of the mechanism, or "linformer-average-full" by role."""
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
    """The attention of each layer; neighbours of the same mechanism and options count as one run of layers.

    `shared` holds what attentions of the whole model use together: give all its stacks the same.
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
    """One attention in a model of these settings; `site` says more of its place (`mtkit.attention.build`)."""
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
    given: str | list[str] | None = getattr(settings, role)
    if given is None:
        given = "full" if settings.name is None else settings.name
        given = given if role in find(given).published else "full"
    if isinstance(given, str):
        given = [given] * layers
    if len(given) != layers:
        raise MtkitError(f"attention.{role} lists {len(given)} mechanisms for {layers} layers; give one per layer")
    for name in given:
        check_role(find(name), role)
    return given


def _roles_for(option: str, names: Mapping[str, list[str]]) -> list[str]:
    """The roles of `names` that an option is meant for: where a mechanism has it, or for a slot, those with layers."""
    # places in the target are not places in the source: across, they are for who names that role
    meant = [role for role in names if len(names) == 1 or (option, role) != ("positions", "cross")]
    roles = [role for role in meant if any(option in SLOTS or option in find(name).options for name in names[role])]
    if not roles:
        used = {name: find(name) for each in names.values() for name in each}
        known = sorted({*SLOTS, *(declared for each in used.values() for declared in each.options)})
        who = f"none of {', '.join(used)} has an" if len(used) > 1 else f"'{''.join(used)}' has no"
        if not any(names[role] for role in meant):
            who = f"there is no {' or '.join(meant)} attention to have an"
        hint = did_you_mean(option, known)
        raise MtkitError(f"{who} attention option {shown(option)}{hint}; known: {', '.join(known)}")
    return roles


def _choice(mechanism: Mechanism, options: Mapping[str, Any], tasks: int) -> Choice:
    """The options of a role that are this mechanism's; the layers of one role may differ in mechanism."""
    own = {key: value for key, value in options.items() if key in mechanism.options or key in SLOTS}
    slots = {key: value for key, value in own.items() if key in SLOTS}
    check_options(mechanism, {key: own[key] for key in own.keys() - slots.keys()})
    check_slots(mechanism, slots)
    if "tasks" in mechanism.options and own.setdefault("tasks", tasks) < tasks:
        raise MtkitError(f"attention '{mechanism.name}' has tasks = {own['tasks']}, and there are {tasks} directions")
    return Choice(mechanism.name, own)


def _short(choices: list[Choice]) -> list[str]:
    return [f"{name} x {count}" if len(set(runs)) > 1 else name for name, count, runs in _runs(choices)]


def _runs(choices: list[Choice]) -> list[tuple[str, int, list[str]]]:
    names = [choice.name for choice in choices]
    return [(name, len(list(run)), names) for name, run in groupby(names)]
