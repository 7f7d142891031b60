"""The registry of mechanisms: each file in a family's folder is a mechanism, unless its name begins with `_`.

A file defines one public class: an `Attention`, or a slot around it (`Projection`, `Merge`, `Regularizer`), whose name
then means `full` with that slot set. Other packages list their mechanisms as modules in the entry point group
`mtkit.attention`. `fill` builds the content of a slot by its name, `mtkit.attention.construction` whole attentions.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mtkit.attention.contract import ROLES, Attention, Site
from mtkit.attention.mixed_heads import MixedHeads, kinds_of
from mtkit.attention.nearby import NEARBY
from mtkit.attention.options import options_of, refused
from mtkit.attention.positions import POSITIONS
from mtkit.attention.slots import SLOTS, Slot, slot_kind
from mtkit.errors import MtkitError, cut_words, did_you_mean, shown

GROUP = "mtkit.attention"
"""Entry point group of other packages' mechanisms: from the mechanism's name to its module."""

SHARED = {"bases", "kernels"}
"""Folders of `mtkit.attention` without mechanisms."""

OTHERS = "other packages"
"""Family of other packages' mechanisms."""

NOT_MECHANISMS: Mapping[str, Mapping[str, Any]] = {"positions": POSITIONS, "nearby": NEARBY}
"""Classes by name, of the slots whose content is not a mechanism's name too."""

DECLARED = ("roles", "published", "paper", "complexity", "growth")
"""Attributes that the class of each mechanism must define."""


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
    sequential_operations: str | None
    longest_path: str | None
    weights: bool
    options: dict[str, Any]
    kind: type[Attention] | type[Slot]
    package: str | None = None
    """Package and version that define it; None for mtkit's own."""
    kinds: tuple[tuple["Mechanism", int], ...] = ()
    """The mechanisms of a mix and their numbers of heads (`mtkit.attention.mixed_heads`); empty for one mechanism."""

    @cached_property
    def slot(self) -> str | None:
        """The slot this name fills when it combines with another mechanism, or None for a mechanism proper."""
        return slot_kind(self.kind)

    @property
    def year(self) -> int | None:
        """Year of the paper, the first if it names several; None if it names none."""
        years = re.findall(r"\b(?:19|20)\d\d\b(?!\.\d)", self.paper)  # 2004.05150 is a number of arXiv
        return int(years[0]) if years else None

    @property
    def mixes(self) -> bool:
        """Whether it can have some heads of a layer while other mechanisms have the others."""
        return self.slot is not None or (issubclass(self.kind, Attention) and self.kind.mixes)


@cache
def _modules() -> dict[str, str]:
    """Return FAMILY.MODULE of each of mtkit's own mechanisms, by name."""
    modules: dict[str, str] = {}
    for file in sorted(file for file in Path(__file__).parent.glob("*/[!_]*.py") if file.parent.name not in SHARED):
        name, module = file.stem.replace("_", "-"), f"{file.parent.name}.{file.stem}"
        if name in modules:
            raise ValueError(f"there are two mechanisms '{name}': {modules[name]} and {module}")
        modules[name] = module
    return modules


@cache
def _own(name: str) -> Mechanism:
    """Return mtkit's own mechanism of this name."""
    module = _modules()[name]
    kind = _only_mechanism_in(importlib.import_module(f"{__package__}.{module}"))
    return _described(name, module.partition(".")[0], kind)


@cache
def mechanisms() -> dict[str, Mechanism]:
    """Return every mechanism by name: mtkit's own, and loadable ones of other packages. It imports all of them.

    Raises: MtkitError if another package's mechanism has the name of an existing one.
    """
    by_name = {name: _own(name) for name in _modules()}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in by_name:
            raise MtkitError(
                f"{_package(entry)} has an attention mechanism '{entry.name}', and there is another one of that name; "
                "rename it, or uninstall that package"
            )
        with suppress(MtkitError):  # `find` raises it for this name
            by_name[entry.name] = _of_package(entry)
    return by_name


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
        sequential_operations=kind.sequential_operations,
        longest_path=kind.longest_path,
        weights=kind.weights,
        options=options_of(kind),
        kind=kind,
        package=package,
    )


def _of_package(entry: EntryPoint) -> Mechanism:
    """Load another package's mechanism. Raises: MtkitError if it cannot be loaded."""
    try:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name):
            raise ValueError("a mechanism's name is small letters, digits and hyphens")
        module = entry.load()
        if not isinstance(module, ModuleType):
            raise TypeError(f"the entry point names {entry.value}, which is not a module")
        return _described(entry.name, OTHERS, _only_mechanism_in(module), _package(entry))
    except (Exception, SystemExit) as error:  # of the package's code
        raise MtkitError(
            f"attention mechanism {shown(entry.name)} of {_package(entry)} cannot be loaded "
            f"({type(error).__name__}: {cut_words(str(error))}); repair or uninstall that package"
        ) from error


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def find(name: str) -> Mechanism:
    """Return the mechanism with this name, or the mix of several, as "full:4+band:4".

    Raises: MtkitError with the nearest name, or with the reason why another package's mechanism cannot be loaded, and
    for a mix that is written wrongly or has a kind that does not mix.
    """
    if (kinds := kinds_of(name)) is not None:
        return _mix([(find(kind), heads) for kind, heads in kinds])
    if name in _modules():
        return _own(name)  # without an import of the others
    known = mechanisms()
    if name not in known:
        for entry in entry_points(group=GROUP, name=name):
            _of_package(entry)
        hint = did_you_mean(name, list(known))
        raise MtkitError(f"no attention mechanism {shown(name)}{hint}; see `mtkit attentions`")
    return known[name]


def names_of_packages() -> frozenset[str]:
    """Return the names of other packages' mechanisms, loadable or not."""
    return frozenset(entry.name for entry in entry_points(group=GROUP))


def _mix(kinds: list[tuple[Mechanism, int]]) -> Mechanism:
    """Return the mix of these mechanisms. Raises: MtkitError for one that does not mix, and if they share no role."""
    for kind, _ in kinds:
        if not kind.mixes:
            raise MtkitError(
                f"attention '{kind.name}' is a whole layer, and cannot have only some of its heads; "
                "`mtkit attentions NAME` shows whether a mechanism mixes"
            )
    members = [kind for kind, _ in kinds]
    name = "+".join(f"{kind.name}:{heads}" for kind, heads in kinds)
    roles = frozenset.intersection(*(kind.roles for kind in members))
    if not roles:
        raise MtkitError(f"the mechanisms of '{name}' have no role in common")
    settings = {option: default for kind in reversed(members) for option, default in kind.options.items()}
    for kind in members:
        settings |= {f"{kind.name}.{option}": default for option, default in kind.options.items()}
        settings |= {f"{kind.name}.{slot}": None for slot in SLOTS}
    costliest = max(members, key=lambda kind: kind.growth)
    direct = any(kind.longest_path == "O(1)" for kind in members)
    return Mechanism(
        name=name,
        family="heads",
        paper="; ".join(dict.fromkeys(kind.paper for kind in members)),
        summary=", ".join(f"{heads} heads of {kind.name}" for kind, heads in kinds),
        roles=roles,
        published=frozenset.intersection(*(kind.published for kind in members)),
        complexity=costliest.complexity,
        growth=costliest.growth,
        sequential_operations=None,
        longest_path="O(1)" if direct else None,
        weights=all(kind.weights for kind in members),
        options=settings,
        kind=MixedHeads,
        kinds=tuple(kinds),
    )


def fill(slot: str, site: Site, *arguments: Any) -> Any:
    """Build what the site names for `slot`; return None if it names nothing.

    Raises: MtkitError for an unknown name or option, and for a name that belongs to another slot.
    """
    value: str | Mapping[str, Any] | None = getattr(site, slot)
    if value is None:
        return None
    name, options = named_slot(slot, value)
    check_slot_role(slot, name, site.role)
    kind: Any = slot_class(slot, name)
    return kind(site, *arguments, **options)


def check_slot_role(slot: str, name: str, role: str) -> None:
    """Raises: MtkitError for an unknown name, and if this content of a slot cannot play the role of its attention."""
    kind: Any = slot_class(slot, name)
    if slot != "positions" and role not in kind.roles:
        raise _wrong_role(f"{slot} {shown(name)}", kind, role)


def check_role(mechanism: Mechanism, role: str) -> None:
    """Raises: MtkitError if the mechanism cannot play the role; the message lists the roles it can play."""
    if role not in ROLES:
        raise MtkitError(f"no role {shown(role)}{did_you_mean(role, list(ROLES))}; the roles are {', '.join(ROLES)}")
    if role not in mechanism.roles:
        raise _wrong_role(f"attention '{mechanism.name}'", mechanism, role)


def _wrong_role(owner: str, playing: Any, role: str) -> MtkitError:
    supported = ", ".join(name for name in ROLES if name in playing.roles)
    return MtkitError(f"{owner} cannot play the role {shown(role)}; it can play: {supported}")


def named_slot(slot: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the options in a slot's value."""
    name, options = (value.get("name"), {**value}) if isinstance(value, Mapping) else (value, {})
    if not isinstance(name, str):
        raise refused(slot, value, "be a name, or a mapping with a name and options, as {name: NAME, OPTION: VALUE}")
    options.pop("name", None)
    return name, options


def slot_class(slot: str, name: str) -> Callable[..., Slot]:
    kinds: Mapping[str, Any] = NOT_MECHANISMS.get(slot) or {
        mechanism.name: mechanism.kind for mechanism in mechanisms().values() if mechanism.slot == slot
    }
    if name not in kinds:
        raise MtkitError(f"no {slot} {shown(name)}{did_you_mean(name, list(kinds))}; there are: {', '.join(kinds)}")
    return kinds[name]


def _only_mechanism_in(module: ModuleType) -> Any:
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and issubclass(kind, Attention | Slot)
        if not kind.__name__.startswith("_")
    ]
    if len(kinds) != 1:
        raise TypeError(f"{module.__name__} must define exactly one public Attention or slot, not {len(kinds)}")
    if missing := [name for name in DECLARED if not hasattr(kinds[0], name)]:
        raise TypeError(f"{kinds[0].__name__} in {module.__name__} does not declare: {', '.join(missing)}")
    _check_declared(kinds[0])
    return kinds[0]


def _check_declared(kind: Any) -> None:
    """Raises: TypeError for a declared attribute of a wrong type, and for roles that do not exist."""
    names = f"a set of {', '.join(ROLES)}"
    for name, is_valid, rule in (
        ("roles", isinstance(kind.roles, Set) and len(kind.roles) > 0 and kind.roles <= set(ROLES), names),
        ("published", isinstance(kind.published, Set) and kind.published <= set(kind.roles), "a set of its roles"),
        ("paper", isinstance(kind.paper, str), "a text"),
        ("complexity", isinstance(kind.complexity, str), "a text"),
        ("growth", isinstance(kind.growth, int | float), "a number"),
    ):
        if not is_valid:
            raise TypeError(f"{name} = {shown(getattr(kind, name))} of {kind.__name__} must be {rule}")
