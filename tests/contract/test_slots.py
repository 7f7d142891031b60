"""What `covering` promises of the cases with slots filled, so that the quick tests leave nothing out."""

from itertools import combinations
from typing import Any

import pytest

from mtkit.attention import mechanisms
from mtkit.attention.registry import Mechanism
from tests.contract.cases import Case, all_cases, can_build, small_options
from tests.contract.slots import covering, taken, values


def quick(mechanism: Mechanism) -> list[tuple[str, set[tuple[str, str]]]]:
    """The role and the filled slots of the cases that every run tests."""
    held = [
        (case.role, {(slot, case.options[slot]["name"]) for slot, _ in values() if slot in case.options})
        for case in all_cases()
        if case.name == mechanism.name and not case.slow
    ]
    return [(role, filled) for role, filled in held if filled]


@pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))
def test_each_role_and_each_value_that_a_mechanism_takes_is_tested(mechanism: Mechanism) -> None:
    wanted = {role: set(taken(mechanism, role)) for role in mechanism.roles if taken(mechanism, role)}
    found = quick(mechanism)
    assert {role for role, _ in found} == set(wanted)
    assert set().union(*(filled for _, filled in found)) == set().union(*wanted.values())
    singles = {(case.role, case.setting) for case in all_cases() if case.name == mechanism.name}
    heads = mechanism.name == "full"  # the names of what fills its other slots stand for these
    for role, each in wanted.items():
        assert all((role, f"{slot}={name}") in singles for slot, name in each if not heads or slot == "positions")


@pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))
def test_each_slot_that_a_mechanism_declares_can_be_filled_in_some_role(mechanism: Mechanism) -> None:
    for declared in getattr(mechanism.kind, "slots", {}):
        names = [name for slot, name in (*values(), ("nearby", "convolution")) if slot == declared]
        options = [small_options(mechanism.kind) | {declared: name} for name in names]
        cases = [Case(mechanism.name, role, declared, each) for each in options for role in mechanism.roles]
        assert any(map(can_build, cases)), declared


def test_every_pair_of_values_is_tested_around_some_mechanism() -> None:
    able = [set(taken(mechanism, role)) for mechanism in mechanisms().values() for role in mechanism.roles]
    tested = [filled for mechanism in mechanisms().values() for _, filled in quick(mechanism)]
    kinds: Any = values()
    for one, other in combinations(kinds, 2):
        apart = one[1] in kinds[other].apart_from or other[1] in kinds[one].apart_from
        if one[0] != other[0] and not apart and any({one, other} <= each for each in able):
            assert any({one, other} <= each for each in tested), f"{one} never meets {other}"


def test_what_cannot_be_built_is_left_out() -> None:
    chosen = list(covering(mechanisms()["full"], lambda role, filled: role != "decoder" and len(filled) < 3, set()))
    assert {role for role, _ in chosen} == {"encoder", "cross"}
    assert max(len(filled) for _, filled in chosen) == 2
    assert len({filled for _, each in chosen for filled in each}) == len(values())
