"""Builds an attention by name, and checks its options and slots before."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from torch import nn

from mtkit.attention.contract import Attention, Site
from mtkit.attention.mixed_heads import MixedHeads
from mtkit.attention.options import check, refused
from mtkit.attention.registry import Mechanism, check_role, find, named_slot, slot_class
from mtkit.attention.slots import SLOTS
from mtkit.errors import MtkitError, cut_words, did_you_mean, shown
from mtkit.memory import WithinMemory, is_oom
from mtkit.storage.records import as_python


def build(
    name: str,
    *,
    role: str,
    d_model: int,
    heads: int,
    layer: int = 0,
    layers: int = 1,
    max_length: int = 1024,
    memory_length: int | None = None,
    memory_width: int | None = None,
    dropout: float = 0.0,
    seed: int = 1,
    positions: str | Mapping[str, Any] | None = None,
    projection: str | Mapping[str, Any] | None = None,
    merge: str | Mapping[str, Any] | None = None,
    regularizer: str | Mapping[str, Any] | None = None,
    nearby: str | Mapping[str, Any] | None = None,
    shared: MutableMapping[Any, nn.Module] | None = None,
    **options: Any,
) -> Attention:
    """Return the attention sub-layer `name` for one site of a model; see `Site` for the arguments.

    Raises: MtkitError for an unknown name, role, option or slot, a number out of range, or parts that cannot be
    combined.
    """
    numbers: dict[str, Any] = {"d_model": d_model, "heads": heads, "layer": layer, "layers": layers}
    numbers |= {"max_length": max_length, "memory_length": memory_length, "memory_width": memory_width}
    numbers |= {"dropout": dropout, "seed": seed}
    slots = {"positions": positions, "projection": projection, "merge": merge}
    slots |= {"regularizer": regularizer, "nearby": nearby}
    modules = {} if shared is None else shared
    site = Site(role=role, **_checked(as_python(numbers)), **as_python(slots), shared=modules)
    if not isinstance(name, str):
        raise MtkitError(f"an attention is named by a text, not {shown(name)}; `mtkit attentions` lists the names")
    return _built(find(name), site, as_python(options))


def _checked(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a site. Raises: MtkitError for one that is out of range or has another type."""
    for name, value in numbers.items():
        if name == "dropout":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise refused(name, value, "be a number from 0 to below 1")
        elif value is not None or not name.startswith("memory_"):
            least = 0 if name in ("layer", "seed") else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise refused(name, value, f"be a whole number from {least}")
    return numbers


def _built(mechanism: Mechanism, site: Site, options: Mapping[str, Any]) -> Attention:
    check_role(mechanism, site.role)
    check_options(mechanism, options)
    if mechanism.kinds:
        return _mixed(mechanism, site, options)
    if mechanism.slot is not None:
        _check_own_slot(mechanism, getattr(site, mechanism.slot))
        filled: dict[str, Any] = {mechanism.slot: {"name": mechanism.name, **options}}
        return _built(find("full"), replace(site, **filled), {})
    check_slots(mechanism, {slot: getattr(site, slot) for slot in SLOTS})
    written = ", ".join(f"{option} = {shown(value)}" for option, value in options.items())
    with WithinMemory(f"attention '{mechanism.name}'{f' with {written}' if written else ''}"):
        try:
            return mechanism.kind(site, **options)  # type: ignore[return-value]
        except Exception as error:
            if mechanism.package is None or isinstance(error, MtkitError) or is_oom(error):
                raise
            raise MtkitError(
                f"attention '{mechanism.name}' of {mechanism.package} cannot be built "
                f"({type(error).__name__}: {cut_words(str(error))}); repair that package"
            ) from error


def _mixed(mechanism: Mechanism, site: Site, options: Mapping[str, Any]) -> MixedHeads:
    """Build a mix: each kind with its heads, its options and slots, and the slots of the site."""
    check_slots(mechanism, {slot: getattr(site, slot) for slot in SLOTS})
    check_heads(mechanism, site.heads)
    parts = []
    for (kind, count), settings in zip(mechanism.kinds, _settings_of_kinds(mechanism, options), strict=True):
        slots = {slot: settings.pop(slot) for slot in SLOTS if slot in settings}
        parts.append(_built(kind, replace(site, heads=count, layer_heads=site.heads, **slots), settings))
    return MixedHeads(site, parts)


def check_heads(mechanism: Mechanism, heads: int) -> None:
    """Raises: MtkitError if the kinds of a mix do not have the heads of the layer together."""
    together = sum(count for _, count in mechanism.kinds)
    if together not in (0, heads):
        raise MtkitError(
            f"attention '{mechanism.name}' has {together} heads, and the model {heads}; change one of the two numbers"
        )


def _settings_of_kinds(mechanism: Mechanism, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options and slots of each kind in a mix; KIND.OPTION overrides OPTION, which all kinds with it get."""
    settings = []
    for kind, _ in mechanism.kinds:
        common = {name: value for name, value in options.items() if name in kind.options}
        prefix = f"{kind.name}."
        of_kind = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
        settings.append(common | of_kind)
    return settings


def check_options(mechanism: Mechanism, options: Mapping[str, Any]) -> None:
    """Raises: MtkitError for an option that the mechanism does not declare, and for a value that an option does not
    accept.
    """
    if not mechanism.kinds:
        check(f"attention '{mechanism.name}'", mechanism.kind, options)
        return
    for name in options:
        if name not in mechanism.options:
            hint = did_you_mean(str(name), list(mechanism.options))
            raise MtkitError(f"attention '{mechanism.name}' has no option {shown(name)}{hint}")
    for (kind, _), settings in zip(mechanism.kinds, _settings_of_kinds(mechanism, options), strict=True):
        check_options(kind, {name: value for name, value in settings.items() if name not in SLOTS})
        check_slots(kind, {name: value for name, value in settings.items() if name in SLOTS})


def check_slots(mechanism: Mechanism, slots: Mapping[str, Any]) -> None:
    """Raises: MtkitError for slot values that are unknown or that this mechanism cannot combine with, and for their
    options.
    """
    if mechanism.kinds:
        _check_slots_of_mix(mechanism, slots)
        return
    host = mechanism if mechanism.slot is None else find("full")
    if mechanism.slot is not None:
        _check_own_slot(mechanism, slots.get(mechanism.slot))
    for slot, value in slots.items():
        if value is None:
            continue
        name, options = named_slot(slot, value)
        supported: Mapping[str, frozenset[str] | None] = host.kind.slots  # type: ignore[union-attr]
        allowed = supported.get(slot, frozenset())
        if allowed is not None and name not in allowed:
            choices = f"; it can combine with: {', '.join(sorted(allowed))}" if allowed else ""
            raise MtkitError(f"attention '{mechanism.name}' cannot combine with {slot}={name}{choices}")
        check(f"{slot} {shown(name)}", slot_class(slot, name), options)
    filled = {slot: named_slot(slot, value)[0] for slot, value in slots.items() if value is not None}
    filled |= {} if mechanism.slot is None else {mechanism.slot: mechanism.name}
    for slot, name in filled.items():
        kind: Any = slot_class(slot, name)
        for other, other_name in filled.items():
            if other_name in kind.apart_from:
                raise MtkitError(f"{slot}={name} cannot combine with {other}={other_name}")


def _check_slots_of_mix(mechanism: Mechanism, slots: Mapping[str, Any]) -> None:
    """Raises: MtkitError for a slot that reads all heads of a layer, and as `check_slots` for each kind."""
    for member, _ in mechanism.kinds:
        for slot in ("merge", "regularizer"):
            if slots.get(slot) is not None:
                raise MtkitError(
                    f"attention '{mechanism.name}' cannot combine with {slot}, which reads all heads of a layer; "
                    f"set it for one kind, as in {member.name}.{slot}"
                )
        check_slots(member, slots)


def _check_own_slot(mechanism: Mechanism, value: Any) -> None:
    if value is not None:
        raise MtkitError(f"attention '{mechanism.name}' is itself a {mechanism.slot}: leave {mechanism.slot}= out")
