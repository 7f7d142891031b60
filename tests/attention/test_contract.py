"""One signature for all mechanisms: the base class packs the arguments, and a mechanism gets one object."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Beginning, Inputs, Site, State, build

SITE = Site("cross", 8, 2)


class Noting(Attention):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(SITE)
        self.noted: list[Any] = []

    def attend(self, inputs: Inputs) -> Attended:
        self.noted.append(inputs)
        return Attended(inputs.query)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        self.noted.append(inputs)
        return {}, inputs.carry

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        self.noted.append(inputs)
        return Attended(inputs.query), state


def test_every_argument_reaches_the_mechanism_under_its_name() -> None:
    noting = Noting()
    query, memory, task = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), torch.zeros(2, dtype=torch.long)
    query_valid, memory_valid = (torch.ones(x.shape[:2], dtype=torch.bool) for x in (query, memory))
    given = {"carry": "below", "memory_carry": "encoder", "task": task}
    noting(query, memory, query_valid=query_valid, memory_valid=memory_valid, need_weights=True, **given)
    noting.start(2, memory, memory_valid, hypotheses=3, **given)
    noting.step(query, {}, carry="below", need_weights=True)
    attend, begin, advance = (vars(each) for each in noting.noted)
    masks = {"query_valid": query_valid, "memory_valid": memory_valid}
    assert attend == {"query": query, "memory": memory, **masks, **given, "need_weights": True}
    assert begin == {"batch_size": 2, "memory": memory, "memory_valid": memory_valid, "hypotheses": 3, **given}
    assert advance == vars(Inputs(query, carry="below", need_weights=True))


def test_the_context_is_the_memory_and_in_the_self_roles_the_query() -> None:
    query, memory, valid = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), torch.ones(2, 3, dtype=torch.bool)
    alone, cross = Inputs(query, query_valid=valid), Inputs(query, memory, query_valid=valid)
    assert alone.context is query
    assert alone.context_valid is valid
    assert cross.context is memory
    assert cross.context_valid is None
    with pytest.raises(FrozenInstanceError):
        cross.query = memory  # type: ignore[misc]


class Direct(Attention):
    """Defines the public methods themselves, as code of users may."""

    def forward(self, query: Tensor, *_: Any, **__: Any) -> Attended:  # type: ignore[override]
        return Attended(query.cumsum(1))

    def start(self, batch_size: int, *_: Any, hypotheses: int = 1, **__: Any) -> tuple[State, Any]:  # type: ignore[override]
        return {"total": torch.zeros(batch_size, hypotheses, 8)}, None

    def step(self, query: Tensor, state: State, **_: Any) -> tuple[Attended, State]:  # type: ignore[override]
        total = state["total"] + query
        return Attended(total), {"total": total}


def test_a_mechanism_may_define_the_public_methods() -> None:
    direct, x = Direct(Site("decoder", 8, 2)), torch.randn(2, 3, 8)
    state, _ = direct.start(2)
    for t in range(3):
        attended, state = direct.step(x[:, t : t + 1], state)
    torch.testing.assert_close(direct(x).output[:, -1:], attended.output)


def test_a_public_method_may_extend_the_one_of_a_mechanism() -> None:
    full = build("full", role="decoder", d_model=8, heads=2)

    class Doubled(type(full)):  # type: ignore[misc]
        def forward(self, query: Tensor, memory: Tensor | None = None, **given: Any) -> Attended:
            return Attended(2 * super().forward(query, memory, **given).output)

        def start(self, batch_size: int, memory: Tensor | None = None, *rest: Any, **given: Any) -> tuple[State, Any]:
            return super().start(batch_size, memory, *rest, **given)

        def step(self, query: Tensor, state: State, **given: Any) -> tuple[Attended, State]:
            attended, state = super().step(query, state, **given)
            return Attended(2 * attended.output), state

    doubled, x = Doubled(full.site), torch.randn(2, 1, 8)
    doubled.load_state_dict(full.state_dict())
    assert torch.equal(doubled(x).output, 2 * full(x).output)
    assert torch.equal(doubled.step(x, doubled.start(2)[0])[0].output, 2 * full.step(x, full.start(2)[0])[0].output)
