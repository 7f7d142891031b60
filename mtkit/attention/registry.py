"""The registry of mechanisms is the folder: a file in a family's folder is a mechanism.

Mechanisms of other packages are modules that these name in the entry point group `mtkit.attention`.

Files that begin with `_` are helpers of the mechanisms beside them. Slots, too, are looked up by name here (`fill`).

A file has exactly one public `Attention` or slot class (`Projection`, `Merge`, `Regularizer`). A slot's name selects
`full` with that slot set.
"""

import importlib
import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from mtkit.attention.contract import ROLES, Attention, Site
from mtkit.attention.options import check, options_of, refused
from mtkit.attention.positions import POSITIONS
from mtkit.attention.slots import SLOTS, Positions, Slot, slot_kind
from mtkit.errors import MtkitError, cut_words, did_you_mean, shown
from mtkit.memory import WithinMemory
from mtkit.storage.records import as_python

GROUP = "mtkit.attention"
"""Entry point group of other packages' mechanisms: the mechanism's name, and its module."""

SHARED = {"bases", "kernels"}
"""Folders of `mtkit.attention` that hold no mechanisms."""

OTHERS = "other packages"
"""Family of other packages' mechanisms."""

DECLARED = ("roles", "published", "paper", "complexity", "growth")
"""What the class of each mechanism says of it."""


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism, as the command line, the documentation and the tests see it."""

    name: str
    family: str
    paper: str
    summary: str
    roles: frozenset[str]
    published: frozenset[str]
    complexity: str
    growth: float
    weights: bool
    options: dict[str, Any]
    kind: type[Attention] | type[Slot]
    package: str | None = None
    """Package and version that it belongs to; None for mtkit's own."""

    @property
    def slot(self) -> str | None:
        """The slot this name fills when it combines with another mechanism, or None for a mechanism proper."""
        return slot_kind(self.kind)


@cache
def mechanisms() -> dict[str, Mechanism]:
    """Every mechanism by name: mtkit's own, and those of other packages that can be loaded.

    Raises: MtkitError for another package's mechanism with the name of one that is already known.
    """
    found: dict[str, Mechanism] = {}
    for file in sorted(file for file in Path(__file__).parent.glob("*/[!_]*.py") if file.parent.name not in SHARED):
        family, name = file.parent.name, file.stem.replace("_", "-")
        if name in found:
            raise ValueError(f"two families have a mechanism '{name}': {found[name].family} and {family}")
        kind = _only_mechanism_in(importlib.import_module(f"{__package__}.{family}.{file.stem}"))
        found[name] = _described(name, family, kind)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in found:
            raise MtkitError(
                f"{_package(entry)} has an attention mechanism '{entry.name}', and there is another one of that name; "
                "rename it, or uninstall that package"
            )
        with suppress(MtkitError):  # `find` raises it for this name
            found[entry.name] = _of_package(entry)
    return found


def _described(name: str, family: str, kind: Any, package: str | None = None) -> Mechanism:
    return Mechanism(
        name=name,
        family=family,
        paper=kind.paper,
        summary=(kind.__doc__ or "").strip().partition("\n")[0].rstrip("."),
        roles=kind.roles,
        published=kind.published,
        complexity=kind.complexity,
        growth=kind.growth,
        weights=kind.weights,
        options=options_of(kind),
        kind=kind,
        package=package,
    )


def _of_package(entry: EntryPoint) -> Mechanism:
    """Another package's mechanism. Raises: MtkitError if it cannot be loaded."""
    try:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name):
            raise ValueError("a mechanism's name is small letters, digits and hyphens")
        module = entry.load()
        if not isinstance(module, ModuleType):
            raise TypeError(f"the entry point names {entry.value}, which is not a module")
        return _described(entry.name, OTHERS, _only_mechanism_in(module), _package(entry))
    except Exception as error:  # of the package's code
        raise MtkitError(
            f"attention mechanism {shown(entry.name)} of {_package(entry)} cannot be loaded "
            f"({type(error).__name__}: {cut_words(str(error))}); repair or uninstall that package"
        ) from error


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


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
    shared: MutableMapping[Any, nn.Module] | None = None,
    **options: Any,
) -> Attention:
    """The attention sub-layer `name` for one site of a model; see `Site` for the arguments.

    Raises: MtkitError for an unknown name, role, option or slot, a number out of range, and for what cannot combine.
    """
    numbers: dict[str, Any] = {
        "d_model": d_model,
        "heads": heads,
        "layer": layer,
        "layers": layers,
        "max_length": max_length,
    }
    numbers |= {"memory_length": memory_length, "memory_width": memory_width, "dropout": dropout, "seed": seed}
    site = Site(
        role=role,
        **_checked(as_python(numbers)),
        positions=as_python(positions),
        projection=as_python(projection),
        merge=as_python(merge),
        regularizer=as_python(regularizer),
        shared={} if shared is None else shared,
    )
    return _built(find(name), site, as_python(options))


def _checked(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a site. Raises: MtkitError for one that is out of range or has another type."""
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
    if mechanism.slot is not None:
        _check_own_slot(mechanism, getattr(site, mechanism.slot))
        filled: dict[str, Any] = {mechanism.slot: {"name": mechanism.name, **options}}
        return _built(find("full"), replace(site, **filled), {})
    check_slots(mechanism, {slot: getattr(site, slot) for slot in SLOTS})
    given = ", ".join(f"{option} = {shown(value)}" for option, value in options.items())
    with WithinMemory(f"attention '{mechanism.name}'{f' with {given}' if given else ''}"):
        return mechanism.kind(site, **options)  # type: ignore[return-value]


def find(name: str) -> Mechanism:
    """The mechanism of that name.

    Raises: MtkitError with the nearest name, or with the reason why another package's mechanism cannot be loaded.
    """
    known = mechanisms()
    if name not in known:
        for entry in entry_points(group=GROUP, name=name):
            _of_package(entry)
        hint = did_you_mean(name, list(known))
        raise MtkitError(f"no attention mechanism {shown(name)}{hint}; see `mtkit attentions`")
    return known[name]


def fill(slot: str, site: Site, *arguments: Any) -> Any:
    """What the site names for `slot`, built, or None where it names nothing.

    Raises: MtkitError for an unknown name or option, and for a name that belongs elsewhere.
    """
    value: str | Mapping[str, Any] | None = getattr(site, slot)
    if value is None:
        return None
    name, options = _named(slot, value)
    kind: Any = _slot_kind(slot, name)
    if slot != "positions" and site.role not in kind.roles:
        can = ", ".join(each for each in ROLES if each in kind.roles)
        raise MtkitError(f"{slot} {shown(name)} cannot play the role '{site.role}'; it can play: {can}")
    return kind(site, *arguments, **options)


def check_role(mechanism: Mechanism, role: str) -> None:
    """Raises: MtkitError where the mechanism cannot play the role, naming those it can."""
    if role not in ROLES:
        raise MtkitError(f"no role {shown(role)}{did_you_mean(role, list(ROLES))}; the roles are {', '.join(ROLES)}")
    if role not in mechanism.roles:
        can = ", ".join(each for each in ROLES if each in mechanism.roles)
        raise MtkitError(f"attention '{mechanism.name}' cannot play the role {shown(role)}; it can play: {can}")


def check_options(mechanism: Mechanism, options: Mapping[str, Any]) -> None:
    """Raises: MtkitError for an option that the mechanism does not declare, and for a value that it does not take."""
    check(f"attention '{mechanism.name}'", mechanism.kind, options)


def check_slots(mechanism: Mechanism, slots: Mapping[str, Any]) -> None:
    """Raises: MtkitError for what cannot stand in a slot, or not in one of this mechanism, and for its options."""
    host = mechanism if mechanism.slot is None else find("full")
    if mechanism.slot is not None:
        _check_own_slot(mechanism, slots.get(mechanism.slot))
    for slot, value in slots.items():
        if value is None:
            continue
        name, options = _named(slot, value)
        takes: Mapping[str, frozenset[str] | None] = host.kind.slots  # type: ignore[union-attr]
        allowed = takes.get(slot, frozenset())
        if allowed is not None and name not in allowed:
            able = f"; it can combine with: {', '.join(sorted(allowed))}" if allowed else ""
            raise MtkitError(f"attention '{mechanism.name}' cannot combine with {slot}={name}{able}")
        check(f"{slot} {shown(name)}", _slot_kind(slot, name), options)
    held = {slot: _named(slot, value)[0] for slot, value in slots.items() if value is not None}
    held |= {} if mechanism.slot is None else {mechanism.slot: mechanism.name}
    for slot, name in held.items():
        kind: Any = _slot_kind(slot, name)
        for other, value in held.items():
            if value in kind.apart_from:
                raise MtkitError(f"{slot}={name} cannot combine with {other}={value}")


def _check_own_slot(mechanism: Mechanism, value: Any) -> None:
    if value is not None:
        raise MtkitError(f"attention '{mechanism.name}' is itself a {mechanism.slot}: leave {mechanism.slot}= out")


def _named(slot: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The name that a slot's value gives, and the options beside it."""
    name, options = (value.get("name"), {**value}) if isinstance(value, Mapping) else (value, {})
    if not isinstance(name, str):
        raise refused(slot, value, "be a name, or a mapping with a name and options, as {name: NAME, OPTION: VALUE}")
    options.pop("name", None)
    return name, options


def _slot_kind(slot: str, name: str) -> Callable[..., Slot]:
    return _positions(name) if slot == "positions" else _member(slot, name)


def _positions(name: str) -> Callable[..., Positions]:
    if name not in POSITIONS:
        raise MtkitError(
            f"no positions {shown(name)}{did_you_mean(name, list(POSITIONS))}; there are {', '.join(POSITIONS)}"
        )
    return POSITIONS[name]


def _member(slot: str, name: str) -> Callable[..., Slot]:
    members = {each.name: each.kind for each in mechanisms().values() if each.slot == slot}
    if name not in members:
        there = ", ".join(members) or "none yet"
        raise MtkitError(f"no {slot} {shown(name)}{did_you_mean(name, list(members))}; there are: {there}")
    return members[name]  # type: ignore[return-value]


def _only_mechanism_in(module: ModuleType) -> Any:
    own = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__ and issubclass(each, Attention | Slot)
        if not each.__name__.startswith("_")
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define exactly one public Attention or slot, not {len(own)}")
    if missing := [name for name in DECLARED if not hasattr(own[0], name)]:
        raise TypeError(f"{own[0].__name__} in {module.__name__} does not declare: {', '.join(missing)}")
    return own[0]
