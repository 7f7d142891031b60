"""Which slots around which mechanism the contract tests fill."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

from mtkit.attention import ROLES, mechanisms
from mtkit.attention.positions import POSITIONS
from mtkit.attention.registry import Mechanism
from mtkit.attention.slots import SLOTS

Value = tuple[str, str]
"""A slot and the name of what it holds."""


def values() -> dict[Value, type]:
    """Everything that a slot can hold, and its class; positions by one of the names of each."""
    positions: dict[type, str] = {kind: name for name, kind in POSITIONS.items()}
    heads = {(other.slot, other.name): other.kind for other in mechanisms().values() if other.slot is not None}
    return {("positions", name): kind for kind, name in positions.items()} | heads


def taken(mechanism: Mechanism, role: str) -> list[Value]:
    """The values that the slots of a mechanism take in a role."""
    takes: Mapping[str, frozenset[str] | None] = getattr(mechanism.kind, "slots", {})
    return [
        (slot, name)
        for (slot, name), kind in values().items()
        if role in kind.roles and slot in takes and (takes[slot] is None or name in takes[slot])
    ]


def covering(
    mechanism: Mechanism, works: Callable[[str, tuple[Value, ...]], bool], met: set[Any]
) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Roles with slots filled: together they play every role, hold each value, and each pair of values not yet `met`.

    Positions and projections stand once without a merge and a regulariser, too: these read each head, and so turn
    faster paths off. Cases hold as much as they can, so there are few. `works` says whether the mechanism can be built
    so; `met` gains the pairs, so that of all mechanisms one has each.
    """
    roles = [role for role in ROLES if role in mechanism.roles and taken(mechanism, role)]
    fillings = [(role, filled) for role in roles for filled in _fillings(taken(mechanism, role))]
    shown = {each: new for each in fillings if (new := _shown(*each) - met)}
    times = Counter(dict.fromkeys(roles, 0))
    while shown:
        role, filled = best = max(shown, key=lambda each: (len(shown[each]), -times[each[0]], len(each[1])))
        new = shown.pop(best)
        if works(role, filled):
            met.update(combinations(filled, 2))
            times[role] += 1
            yield role, filled
            shown = {each: rest for each, parts in shown.items() if (rest := parts - new)}


def _shown(role: str, filled: tuple[Value, ...]) -> set[Any]:
    """What a case shows: its role, its values, their pairs, and values that nothing after the heads goes with."""
    after = any(slot in ("merge", "regularizer") for slot, _ in filled)
    return {role, *filled, *combinations(filled, 2)} | (set() if after else {("alone", value) for value in filled})


def _fillings(taken: list[Value]) -> list[tuple[Value, ...]]:
    """Every way to fill some of the slots, each with one of its values."""
    choices = [[None, *(value for value in taken if value[0] == slot)] for slot in SLOTS]
    return [filled for each in product(*choices) if (filled := tuple(value for value in each if value is not None))]
