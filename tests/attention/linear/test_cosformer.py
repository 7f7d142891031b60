"""cosFormer: the equation of the paper, its limits, and positions that depend on no other segment."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import Attention
from mtkit.errors import MtkitError
from tests.attention.small import ROLES, maker, refusals, tokens

make = maker("cosformer", double=True, seed=0, chunk=4)


def memory_of(role: str, *shape: int) -> Tensor | None:
    return tokens(*shape) if role == "cross" else None


def equation(attention: Attention, x: Tensor, memory: Tensor | None, horizon: int, elu: bool = False) -> Tensor:
    """Relu(q_i) . relu(k_j) cos(pi (i - j) / (2 M)), normalised by rows."""
    q, k, v = (
        linear(side).unflatten(-1, (4, 8)).transpose(1, 2)
        for linear, side in (
            (attention.q_proj, x),
            (attention.k_proj, x if memory is None else memory),
            (attention.v_proj, x if memory is None else memory),
        )
    )
    feature = (lambda each: F.elu(each) + 1) if elu else (lambda each: each.clamp(min=0))
    distance = torch.arange(x.shape[1]).double()[:, None] - torch.arange(k.shape[2])
    weights = feature(q) @ feature(k).mT * torch.cos(math.pi * distance / (2 * horizon))
    if attention.site.causal:
        weights = weights.tril()
    heads = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) @ v
    output: Tensor = attention.out_proj(heads.transpose(1, 2).flatten(2))
    return output


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("activation", ["relu", "elu1"])
@pytest.mark.parametrize("horizon", [13, 40])
@torch.no_grad()
def test_it_is_the_equation_of_the_paper(role: str, activation: str, horizon: int) -> None:
    attention = make(role, horizon=horizon, activation=activation)
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    wanted = equation(attention, x, memory, horizon, elu=activation == "elu1")
    torch.testing.assert_close(attention(x, memory).output, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_the_default_horizon_is_the_longest_length_of_both_sides(role: str) -> None:
    """It is not the length of the batch."""
    attention = make(role, max_length=20, memory_length=30 if role == "cross" else None)
    assert attention.longest == (30 if role == "cross" else 20)
    x, memory = tokens(2, 11), memory_of(role, 2, 7)
    wanted = equation(attention, x, memory, attention.longest)
    torch.testing.assert_close(attention(x, memory).output, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("activation", ["relu", "elu1"])
@torch.no_grad()
def test_over_a_thousandth_of_the_horizon_it_is_linear_attention(role: str, activation: str) -> None:
    attention = make(role, horizon=13_000, activation=activation)
    linear = make(role, "linear", feature_map=activation, eps=1e-12)
    linear.load_state_dict(attention.state_dict())
    x, memory = tokens(2, 13), memory_of(role, 2, 13)
    torch.testing.assert_close(attention(x, memory).output, linear(x, memory).output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_without_content_it_is_a_mean_weighted_by_cosines(role: str) -> None:
    attention = make(role, horizon=16)
    for linear in (attention.q_proj, attention.k_proj):
        linear.weight.zero_()
        linear.bias.view(4, 8)[:, 3] = 1.0
    x, memory = tokens(1, 16), memory_of(role, 1, 16)
    context = x if memory is None else memory
    for i in (0, 5, 15):
        seen = range(i + 1 if role == "decoder" else 16)
        weights = torch.tensor([math.cos(math.pi * (i - j) / 32) for j in seen], dtype=torch.float64)
        values = attention.v_proj(context[0, : len(seen)])
        mean = (weights / weights.sum()) @ values
        torch.testing.assert_close(attention(x, memory).output[0, i], attention.out_proj(mean))


@torch.no_grad()
def test_one_key_is_its_value_or_nothing() -> None:
    """Nothing where relu leaves no product above zero."""
    for sign in (1.0, -1.0):
        attention = make("cross")
        attention.q_proj.weight.zero_()
        attention.q_proj.bias.fill_(sign)
        attention.k_proj.weight.zero_()
        attention.k_proj.bias.fill_(0.5)
        x, memory = tokens(2, 5), tokens(2, 1)
        values = attention.v_proj(memory) if sign > 0 else torch.zeros(2, 1, 32, dtype=torch.float64)
        wanted = attention.out_proj(values).expand(-1, 5, -1)
        torch.testing.assert_close(attention(x, memory).output, wanted)


@torch.no_grad()
def test_a_target_beyond_the_horizon_stands_at_its_end() -> None:
    """In whole sequences and in steps; weights that change sign would divide by nearly nothing."""
    attention, x, memory = make("cross", horizon=6, activation="elu1"), tokens(1, 20), tokens(1, 6)
    x[:, 6:] = x[:, 6:7]
    output = attention(x, memory).output
    torch.testing.assert_close(output[:, 6:], output[:, 6:7].expand(-1, 14, -1))
    assert (output[:, 5] - output[:, 6]).abs().max() > 1e-3
    state, _ = attention.start(1, memory)
    for i in range(20):
        stepped, state = attention.step(x[:, i : i + 1], state)
        torch.testing.assert_close(stepped.output, output[:, i : i + 1])


@pytest.mark.parametrize(("options", "limit"), [({"horizon": 6}, "horizon"), ({"max_length": 6}, "model.max_length")])
@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_keys_beyond_the_horizon_are_refused(role: str, options: dict[str, int], limit: str) -> None:
    attention, message = make(role, **options), f"built for 6 positions, not 7: raise {limit}"
    x, memory = tokens(1, 7), memory_of(role, 1, 7)
    with pytest.raises(MtkitError, match=message):
        attention(x, memory)
    if role == "cross":
        with pytest.raises(MtkitError, match=message):
            attention.start(1, memory)
    if role == "decoder":
        state, _ = attention.start(1)
        for i in range(6):
            _, state = attention.step(x[:, i : i + 1], state)
        with pytest.raises(MtkitError, match=message):
            attention.step(x[:, 6:], state)


def test_features_stay_in_float32_under_autocast() -> None:
    """Bfloat16 would place 257 at 256."""
    attention = make("encoder", max_length=600).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention.queries(torch.randn(1, 4, 32)).dtype == torch.float32
    rows = attention.bfloat16()._placed(torch.ones(1, 600, 8, dtype=torch.bfloat16), None)
    angle = math.pi / 2 / 600 * torch.arange(600)
    torch.testing.assert_close(rows[0, :, 0], angle.cos())
    torch.testing.assert_close(rows[0, :, -1], angle.sin())


@torch.no_grad()
def test_the_state_has_two_features_a_channel() -> None:
    state, _ = make("decoder").start(2, hypotheses=3)
    assert {name: x.shape[1::2] for name, x in state["recent"]["shared"].items() if name != "position"} == {
        "keys": (4, 16),
        "values": (4, 9),
    }


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"horizon": 0}, "horizon = 0"),
    ({"activation": "hedgehog"}, "one of relu, elu1"),
    ({"positions": "rotary"}, "positions"),
    role="decoder",
)
