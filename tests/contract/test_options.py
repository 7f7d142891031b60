"""Options: each is declared with its values, whatever else is refused in one line, and every legal extreme works."""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import ROLES, build, mechanisms
from mtkit.attention.catalogue import describe
from mtkit.attention.options import MOST, CountsOf, ListOf, OneOf, Option, SomeOf, Within, _kinds, declared
from mtkit.attention.registry import Mechanism
from mtkit.attention.slots import SLOTS
from mtkit.errors import MtkitError
from tests.contract.cases import Case, small_options
from tests.contract.stack import Stack, apart, make, memory_for, tokens

LENGTH = 11
WRONG: tuple[Any, ...] = ("many", True, -1, MOST + 1, 10**12, 0.5, float("nan"), None, [], {}, b"x")
every_mechanism = pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))
every_role = pytest.mark.parametrize(
    ("mechanism", "role"),
    [(each, role) for each in mechanisms().values() for role in ROLES if role in each.roles],
    ids=lambda part: part if isinstance(part, str) else part.name,
)


def ends_of(option: Option) -> list[Any]:
    """The smallest and largest values of an option, each name and each switch; none of lists of any length."""
    values: list[Any] = []
    for kind, limits in _kinds(option.hint):
        switches = [False, True] if kind is bool else [None] if kind is NoneType else []
        values += [value for limit in limits for value in ends_of_limit(limit, kind)] if limits else switches
    return values


def ends_of_limit(limit: Any, kind: type) -> Sequence[Any]:
    match limit:
        case Within():
            return kind(limit.least), kind(limit.most)
        case OneOf():
            return tuple(limit.names)
        case SomeOf():
            return *limit.names, ",".join(limit.names)
        case CountsOf():
            counts = [f"{name}:1" for name in limit.names]
            return *counts, ",".join(counts)
        case ListOf():
            return [] if limit.count is None else [[end] * limit.count for end in ends_of_limit(limit.limits, int)]
    raise TypeError(limit)


@every_mechanism
def test_every_option_declares_its_values_and_has_a_legal_default(mechanism: Mechanism) -> None:
    for name, option in declared(mechanism.kind).items():
        assert option.allows(option.default), name
        assert ends_of(option), f"{name} declares no limits"
        assert all(option.allows(value) for value in ends_of(option)), name
        assert option.rule in re.sub(r"\s+", " ", describe(mechanism.name)), name


@every_mechanism
def test_values_that_an_option_does_not_take_are_refused_with_those_it_takes(mechanism: Mechanism) -> None:
    role = min(mechanism.roles)
    for name, option in declared(mechanism.kind).items():
        wrong = [value for value in WRONG if not option.allows(value)]
        assert len(wrong) > 6
        for value in wrong:
            with pytest.raises(MtkitError, match=f"{name} = .* must be {re.escape(option.rule)}") as refusal:
                build(mechanism.name, role=role, d_model=32, heads=4, **{name: value})
            assert mechanism.name in str(refusal.value)
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("dropout", [1, 2, 2.0, -0.1, float("nan"), True, "0.1", None], "a number from 0 to below 1"),
        *((name, [0, -2, 4.0, True, "4", None], "a whole number from 1") for name in ("d_model", "heads")),
        *((name, [0, -2, 4.0, True, "4", None], "a whole number from 1") for name in ("layers", "max_length")),
        *((name, [0, -2, 4.0, True, "4"], "a whole number from 1") for name in ("memory_length", "memory_width")),
        *((name, [-1, 4.0, True, "4", None], "a whole number from 0") for name in ("layer", "seed")),
    ],
)
def test_numbers_of_a_site_that_are_out_of_range_are_refused(name: str, values: list[Any], rule: str) -> None:
    for value in values:
        with pytest.raises(MtkitError, match=f"^{name} = {re.escape(repr(value))} must be {rule}$"):
            build("full", **{"role": "cross", "d_model": 32, "heads": 4, name: value})


@pytest.mark.parametrize("value", [42, True, [1], {"clip": 3}, {"name": 3}], ids=str)
@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_no_slot_is_refused(slot: str, value: Any) -> None:
    with pytest.raises(MtkitError, match=f"{slot} = .* must be a name"):
        build("full", role="encoder", d_model=32, heads=4, **{slot: value})


@pytest.mark.parametrize(
    ("slot", "value"),
    [
        ("positions", {"name": "shaw", "clip": "far"}),
        ("positions", {"name": "rotary", "half": 2}),
        ("projection", {"name": "grouped-query", "kv_heads": 0}),
        ("merge", {"name": "em-routing", "iterations": 10**9}),
        ("regularizer", {"name": "disagreement", "weight": "x"}),
        ("nearby", {"name": "convolution", "kernel": 4}),
    ],
)
def test_options_of_slots_are_checked_alike(slot: str, value: dict[str, Any]) -> None:
    option = list(value)[-1]
    with pytest.raises(MtkitError, match=f"{slot} '{value['name']}': {option} = .* must be"):
        build("full", role="encoder", d_model=32, heads=4, **{slot: value})


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the largest sizes do not fit."""
    monkeypatch.setattr("mtkit.memory.machine_bytes", lambda: 2.0**24)


def extremes(kind: type, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each option at each of its limits, and sizes beyond the length as well: the largest may be too large to build."""
    for name, option in declared(kind).items():
        values = ends_of(option)
        for value in [*values, *([40] if MOST in values else [])]:
            if value != given.get(name, option.default):
                yield name, value


def run(case: Case, alone: bool = False) -> str:
    """Forward, backward and, in a role that steps, steps, all finite; why it could not be built, or nothing.

    `alone`: as a stack of one attention.
    """
    torch.manual_seed(0)
    try:
        stack = (Stack([case.build(max_length=LENGTH)]) if alone else make(case, max_length=LENGTH)).double()
    except MtkitError as refusal:  # a rule of the site or role, or what takes more than the memory there is
        if not any(words in str(refusal) for words in (" must ", "memory", by_role(case.role))):
            raise
        return str(refusal)
    length = min([LENGTH, *(layer.longest for layer in stack.layers if layer.longest)])  # an option may set the limit
    query = tokens(2, length, dtype=torch.double).requires_grad_()
    memory = memory_for(case, 2, min(7, length), dtype=torch.double)
    output = stack.train()(query, memory)
    output.square().sum().backward()
    assert (query.grad is not None) == stack.layers[-1].reads_query
    assert output.isfinite().all()
    assert query.grad is None or query.grad.isfinite().all()
    assert all(each.grad is None or each.grad.isfinite().all() for each in stack.parameters())
    for layer in stack.layers:
        layer.after_update(1, 10)
    if case.role != "encoder":
        with torch.no_grad():
            check_steps(stack.eval(), query.detach(), memory)
    return ""


def check_steps(stack: Stack, query: Tensor, memory: Tensor | None) -> None:
    stepped, _ = stack.walk(query.unsqueeze(1), stack.start(len(query), memory))
    assert apart(stepped.squeeze(1), stack(query, memory)) < 1e-4


def by_role(role: str) -> str:
    """The words by which a message says that the role cannot have some options."""
    return f"in the {role} role"


def built(mechanism: Mechanism, role: str) -> list[tuple[str, Any]]:
    """The extremes that work alone; besides what the role cannot have, a site may rule out one option, no more."""
    given = small_options(mechanism.kind)
    tried = [
        (each, run(Case(mechanism.name, role, "small", given | dict([each]))))
        for each in extremes(mechanism.kind, given)
    ]
    works = [each for each, refusal in tried if not refusal]
    alone = {name for (name, _), refusal in tried if by_role(role) not in refusal}
    assert len(works) >= len(alone) - 1
    return works


def run_pairs(mechanism: Mechanism, role: str, part: int = 0, parts: int = 1) -> None:
    """Runs every extreme alone, and pairs of them: one of so many parts of the pairs."""
    given, works = small_options(mechanism.kind), built(mechanism, role)
    # names, switches and smallest numbers: large ones take long, and little else
    few = [each for each in extremes(mechanism.kind, given) if type(each[1]) not in (int, float) or each[1] <= 1]
    pairs = [pair for pair in combinations(few, 2) if pair[0][0] != pair[1][0]]
    for pair in pairs[part::parts]:
        if all(each in works for each in pair):
            run(Case(mechanism.name, role, "small", given | dict(pair)), alone=True)


@every_role
def test_every_option_works_at_its_extremes_alone_and_in_pairs_in_some_role(
    mechanism: Mechanism, role: str, little_memory: None
) -> None:
    roles = [each for each in ROLES if each in mechanism.roles]
    run_pairs(mechanism, role, roles.index(role), len(roles))


@pytest.mark.slow
@every_role
def test_every_option_works_at_its_extremes_alone_and_in_pairs(
    mechanism: Mechanism, role: str, little_memory: None
) -> None:
    run_pairs(mechanism, role)
