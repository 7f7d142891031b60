"""The mechanisms as people read them: one table of all, and one page for each."""

import inspect
import sys
import textwrap
from typing import Any

from mtkit.attention.contract import ROLES
from mtkit.attention.options import declared
from mtkit.attention.registry import Mechanism, find, mechanisms
from mtkit.attention.slots import SLOTS
from mtkit.terminal import aligned


def table() -> str:
    """All mechanisms with family, roles, cost and paper, by family."""
    rows = [("name", "family", "roles", "cost", "paper")]
    for each in sorted(mechanisms().values(), key=lambda mechanism: (mechanism.family, mechanism.name)):
        rows.append((each.name, each.family, roles(each), each.complexity, each.paper))
    return aligned(rows, left=range(5))


def describe(name: str) -> str:
    """One mechanism with its options and what its file says of paper, departures and cost.

    Raises: MtkitError for an unknown name.
    """
    mechanism = find(name)
    facts = {
        "paper": mechanism.paper,
        "family": mechanism.family,
        **({} if mechanism.package is None else {"package": mechanism.package}),
        "roles": roles(mechanism),
        "cost": f"{mechanism.complexity}, growing with T to the power {mechanism.growth:g}",
        "weights": "yes" if mechanism.weights else "no",
        "slots": _slots(mechanism),
    }
    documentation = inspect.getdoc(sys.modules[mechanism.kind.__module__]) or ""
    meanings = (inspect.getdoc(mechanism.kind) or "").partition("\n")[2].strip()
    parts = [
        f"{mechanism.name}: {mechanism.summary}",
        "\n".join(f"  {key:8} {value}" for key, value in facts.items()),
        "\n".join(["options (--attention-option NAME=VALUE, for one role ROLE.NAME=VALUE)", *_options(mechanism)]),
        textwrap.indent(meanings, "  "),
        textwrap.indent(documentation.partition("\n")[2].strip(), "  "),
    ]
    return "\n\n".join(part for part in parts if part)


def roles(mechanism: Mechanism) -> str:
    """ "encoder decoder (cross)": published roles, then extensions in brackets."""
    named = [role if role in mechanism.published else f"({role})" for role in ROLES if role in mechanism.roles]
    return " ".join(named)


def _options(mechanism: Mechanism) -> list[str]:
    if not mechanism.options:
        return ["  none"]
    options = declared(mechanism.kind)
    rows = [
        (name, option.null if option.default is None else _written(option.default)) for name, option in options.items()
    ]
    name_width, default_width = (max(len(row[column]) for row in rows) for column in range(2))
    return [
        f"  {name:{name_width}}  {default:{default_width}}  {option.rule}"
        for (name, default), option in zip(rows, options.values(), strict=True)
    ]


def _written(default: Any) -> str:
    """As it is typed after `--attention-option NAME=`."""
    if isinstance(default, tuple):
        return str(list(default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _slots(mechanism: Mechanism) -> str:
    if mechanism.slot is not None:
        return f"is itself a {mechanism.slot}, and combines with other mechanisms as {mechanism.slot}={mechanism.name}"
    slots = getattr(mechanism.kind, "slots", {})
    names = {slot: slots[slot] for slot in SLOTS if slot in slots}
    return ", ".join(slot if some is None else f"{slot} ({', '.join(sorted(some))})" for slot, some in names.items())
