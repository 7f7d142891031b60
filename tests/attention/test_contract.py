"""One signature for all mechanisms: the base class packs the arguments, and a mechanism gets one object."""

import copy
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Beginning, Inputs, Site, State, build, mechanisms, reorder
from mtkit.attention.states import close_gaps, overwrite
from mtkit.decoding.search.continuations import still_running
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import load_recipe

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
    marks = {"query_marks": query_valid.long(), "memory_marks": memory_valid.long()}
    noting(query, memory, query_valid=query_valid, memory_valid=memory_valid, need_weights=True, **given, **marks)
    noting.start(2, memory, memory_valid, hypotheses=3, memory_marks=marks["memory_marks"], **given)
    noting.step(query, {}, carry="below", need_weights=True, query_marks=marks["query_marks"])
    attend, begin, advance = (vars(each) for each in noting.noted)
    masks = {"query_valid": query_valid, "memory_valid": memory_valid}
    assert attend == {"query": query, "memory": memory, **masks, **given, **marks, "need_weights": True}
    source = {"memory": memory, "memory_valid": memory_valid, "memory_marks": marks["memory_marks"]}
    assert begin == {"batch_size": 2, **source, "hypotheses": 3, **given}
    assert advance == vars(Inputs(query, carry="below", need_weights=True, query_marks=marks["query_marks"]))


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.uint8])
def test_a_mask_that_is_not_boolean_is_refused(dtype: torch.dtype) -> None:
    """Hugging Face's tokenizers make integers, which most mechanisms would read as another mask."""
    tokens, valid = torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=dtype)
    with pytest.raises(MtkitError, match=r"query_valid is .*; write query_valid=query_valid\.bool\(\)"):
        Noting()(tokens, tokens, query_valid=valid)
    with pytest.raises(MtkitError, match="memory_valid is"):
        Noting()(tokens, tokens, memory_valid=valid)
    with pytest.raises(MtkitError, match="memory_valid is"):
        Noting().start(2, tokens, valid)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 1), (2, 4), (3, 2), (2, 1, 3), (2, 1, 1, 3), ()])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Broadcasting would let some of them pass in some mechanisms."""
    tokens, valid = torch.zeros(2, 3, 8), torch.ones(shape, dtype=torch.bool)
    for query_valid, memory_valid, name in ((valid, None, "query_valid"), (None, valid, "memory_valid")):
        with pytest.raises(MtkitError, match=re.escape(f"{name} has the shape {shape}, not (2, 3)")):
            Noting()(tokens, tokens, query_valid=query_valid, memory_valid=memory_valid)
    with pytest.raises(MtkitError, match="memory_valid has the shape"):
        Noting().start(2, tokens, valid)


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


PLACES = [(name, role) for name, each in mechanisms().items() for role in ("decoder", "cross") if role in each.roles]
SMALL = {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32, "encoder_layers": 1, "decoder_layers": 2}


def walked(net: Network, state: State, target: Tensor, first: int, last: int) -> tuple[list[Tensor], State]:
    """The logits of each step with target (B, N, T), and the state behind them."""
    found = []
    for position in range(first, last):
        torch.manual_seed(position)
        logits, state, _ = net.step(target[..., position], state)
        found.append(logits.whole())
    return found, state


@torch.no_grad()
@pytest.mark.parametrize(("name", "role"), [*PLACES, ("full", "encoder"), ("rnn", "")])
def test_a_state_is_what_reorder_makes_of_it(name: str, role: str) -> None:
    other = {"model": {"architecture": "rnn"}} if name == "rnn" else {"model": SMALL, "attention": {role: name}}
    net = build_model(load_recipe(None, other), source_vocabulary=24, target_vocabulary=24).eval()
    source, target = torch.randint(4, 24, (7, 9)), torch.randint(4, 24, (7, 2, 12))
    valid = torch.arange(9) < torch.tensor([9, 4, 2, 7, 9, 1, 8])[:, None]
    _, state = walked(net, net.start(net.encode(source, valid), hypotheses=2), target, 0, 4)
    weights = [weight.clone() for weight in [*net.parameters(), *net.buffers()]]
    copied = torch.tensor([[0, 1], [0, 0], [1, 1], [0, 1], [1, 1], [0, 0], [0, 1]])  # which hypothesis each becomes
    expected, state = (
        reorder(copy.deepcopy(state), copied),
        overwrite(state, *torch.tensor([[2, 5, 9, 10], [3, 4, 8, 11]])),
    )
    target[..., :4] = target[..., :4].take_along_dim(copied[..., None], 1)
    one, _ = walked(net, expected, target, 4, 5)
    two, state = walked(net, state, target, 4, 5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(two, one, strict=True))
    assert all(map(torch.equal, weights, [*net.parameters(), *net.buffers()]))
    for index, until in (([0, 5, 2, 6, 4], 8), ([0, 4, 2], 10), ([0], 12)):  # gaps, one gap and an end, an end
        kept = torch.tensor(index)
        expected, other_state = reorder(copy.deepcopy(state), kept), close_gaps(state, kept)
        target = target[kept]
        first = until - 2
        one, _ = walked(net, expected, target, first, until)
        two, state = walked(net, other_state, target, first, until)
        for ours, theirs in zip(two, one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5)  # products of parts may be summed otherwise


def test_segments_that_are_one_in_memory_come_apart() -> None:
    state = {"x": torch.tensor([[3.0]]).expand(4, 5), "y": torch.arange(4)}
    after = close_gaps(state, torch.tensor([0, 3]))
    assert after["x"].tolist() == [[3.0] * 5] * 2
    assert after["y"].tolist() == [0, 3]


def test_hypotheses_that_are_one_in_memory_come_apart() -> None:
    one = torch.tensor([[[1.0]], [[2.0]]])
    state = {"x": one.expand(2, 3, 1), "turned": torch.arange(6).view(3, 2).T, "shared": {"y": torch.arange(2)}}
    after = overwrite(state, torch.tensor([0, 5]), torch.tensor([2, 3]))
    assert after["x"].squeeze(2).tolist() == [[1.0] * 3, [2.0] * 3]
    assert after["turned"].tolist() == [[0, 2, 0], [5, 3, 5]]
    assert one.flatten().tolist() == [1.0, 2.0]
    assert after["shared"]["y"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("done", "kept"),
    [
        ("0000", None),
        ("0100", [0, 3, 2]),
        ("1001", [2, 1]),
        ("0011", [0, 1]),
        ("1111", []),
        ("0000000001", None),  # too few to pay
        ("1000000001", [8, 1, 2, 3, 4, 5, 6, 7]),
        ("0" * 90 + "1" * 7, None),
        ("0" * 90 + "1" * 8, list(range(90))),
        ("1" * 8 + "0" * 90, [*range(90, 98), *range(8, 90)]),
    ],
)
def test_those_who_stay_fill_the_gaps(done: str, kept: list[int] | None) -> None:
    found = still_running(torch.tensor([each == "1" for each in done]), 0)
    assert (found if found is None else found.tolist()) == kept
