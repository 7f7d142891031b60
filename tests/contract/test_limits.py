"""Promise 4, for all alike: a mechanism takes over the projections of `full`. Its own limits stand in its own test."""

from contextlib import suppress

import torch
from torch import nn

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.contract.cases import Case, each, once, small, steps
from tests.contract.stack import make, memory_for, tokens

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def check_projections(case: Case, attention: nn.Module) -> None:
    """Asks for linear maps with bias under the four names, those that the mechanism has."""
    inputs = {"q_proj": 32, "k_proj": case.memory_width or 32, "v_proj": case.memory_width or 32}
    for name in PROJECTIONS:
        projection = getattr(attention, name, None)
        if projection is None:
            continue
        assert isinstance(projection, nn.Linear), name
        assert projection.bias is not None, name
        assert projection.in_features == inputs.get(name, projection.in_features), name
    if hasattr(attention, "out_proj"):
        assert attention.out_proj.out_features == 32


@each(once)
@torch.no_grad()
def test_the_weights_of_full_are_adopted_under_the_names_of_its_projections(case: Case) -> None:
    attention = case.build().eval()
    check_projections(case, attention)
    full = build("full", role=case.role, d_model=32, heads=4, memory_width=case.memory_width)
    state = full.state_dict()
    attention.adopt(state)
    own = attention.state_dict()
    for name in state.keys() & own.keys():
        if own[name].shape == state[name].shape:
            assert torch.equal(own[name], state[name]), name
    output = attention(tokens(2, 6), memory_for(case, 2, 5)).output
    assert output.isfinite().all()


@each(lambda case: small(case) and steps(case))
@torch.no_grad()
def test_steps_beyond_the_maximum_length_go_on_or_are_refused(case: Case) -> None:
    with suppress(MtkitError):
        stack = make(case, max_length=12)
        output, _ = stack.walk(tokens(1, 2, 20), stack.start(1, memory_for(case, 1, 9), hypotheses=2))
        assert output.isfinite().all()
