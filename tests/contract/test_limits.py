"""Promise 4, for all alike: a mechanism takes over the projections of `full`. Its own limits stand in its own test."""

import torch
from torch import nn

from mtkit.attention import build
from tests.contract.cases import Case, each
from tests.contract.stack import make, memory_for, tokens

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@each()
def test_projections_are_linear_with_bias_under_their_four_names(case: Case) -> None:
    attention = make(case).layers[0]
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


@each()
@torch.no_grad()
def test_the_weights_of_full_are_adopted(case: Case) -> None:
    attention = make(case).layers[0]
    full = build("full", role=case.role, d_model=32, heads=4, memory_width=case.memory_width)
    state = full.state_dict()
    attention.adopt(state)
    own = attention.state_dict()
    for name in state.keys() & own.keys():
        if own[name].shape == state[name].shape:
            assert torch.equal(own[name], state[name]), name
    output = attention(tokens(2, 6), memory_for(case, 2, 5)).output
    assert output.isfinite().all()
