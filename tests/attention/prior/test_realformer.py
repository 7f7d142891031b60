"""RealFormer: what the first layer gives, what travels up, and what stays out of it."""

import pytest
import torch
from torch import Tensor

from tests.attention.small import ROLES, VALID, maker

make = maker("realformer", layers=3)


def memory_for(role: str) -> Tensor | None:
    return torch.randn(2, 7, 32) if role == "cross" else None


def masks(role: str) -> dict[str, Tensor]:
    return {"memory_valid" if role == "cross" else "query_valid": VALID}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("slots", [{}, {"positions": "alibi"}, {"projection": "multi-query"}, {"merge": "em-routing"}])
def test_the_first_layer_is_full_attention(role: str, slots: dict[str, str]) -> None:
    if role == "cross":
        slots = {slot: name for slot, name in slots.items() if slot != "positions"}
    full, real = make(role, "full", **slots), make(role, **slots)
    real.load_state_dict(full.state_dict())
    x, memory = torch.randn(2, 7, 32), memory_for(role)
    foreign = torch.randn(2, 4, 7, 7)  # what another mechanism below may have carried
    for carry in (None, foreign):
        got = real(x, memory, carry=carry, need_weights=True, **masks(role))
        wanted = full(x, memory, need_weights=True, **masks(role))
        torch.testing.assert_close(got.output, wanted.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.weights, wanted.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_layers_whose_queries_are_zero_have_the_map_of_the_first(role: str) -> None:
    layers = [make(role, layer=layer) for layer in range(3)]
    with torch.no_grad():
        for layer in layers[1:]:
            layer.q_proj.weight.zero_()
    x, memory, carry, maps = torch.randn(2, 7, 32), memory_for(role), None, []
    for layer in layers:
        attended = layer(torch.randn_like(x) if maps else x, memory, carry=carry, need_weights=True, **masks(role))
        carry = attended.carry
        maps.append(attended.weights)
    torch.testing.assert_close(maps[1], maps[0])
    torch.testing.assert_close(maps[2], maps[0])


@pytest.mark.parametrize("positions", [None, "alibi", "shaw"])
def test_scores_travel_without_mask_bias_or_dropout(positions: str | None) -> None:
    real, x = make("decoder", positions=positions, dropout=0.5).train(), torch.randn(2, 7, 32)
    if positions == "shaw":
        torch.nn.init.normal_(real.positions.keys)
    q, k = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (real.q_proj, real.k_proj))
    scores = q @ k.transpose(-1, -2) / 8**0.5
    torch.testing.assert_close(real(x, query_valid=VALID).carry, scores)
    above = make("decoder", layer=1, positions=positions)
    above.load_state_dict(real.state_dict())
    torch.testing.assert_close(above(x, carry=scores).carry, 2 * scores)


def test_the_bias_of_the_positions_enters_once_a_layer() -> None:
    lower, upper = (make("encoder", layer=layer, positions="alibi") for layer in range(2))
    with torch.no_grad():
        for each in (lower, upper):
            each.q_proj.weight.zero_()
    x = torch.randn(2, 7, 32)
    first = lower(x, need_weights=True)
    torch.testing.assert_close(upper(x, carry=first.carry, need_weights=True).weights, first.weights)


def test_the_running_mean_divides_by_the_layers_so_far() -> None:
    layers = [make("encoder", layer=layer, running_mean=True) for layer in range(3)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    x, carry = torch.randn(2, 7, 32), None
    maps = []
    for layer in layers:
        attended = layer(x, carry=carry, need_weights=True)
        carry = attended.carry
        maps.append(attended.weights)
    torch.testing.assert_close(carry, 3 * layers[0](x).carry)
    torch.testing.assert_close(maps[2], maps[0])
    plain = make("encoder", layer=1)
    plain.load_state_dict(layers[0].state_dict())
    assert not torch.allclose(plain(x, carry=layers[0](x).carry, need_weights=True).weights, maps[0], atol=1e-3)


def test_scores_stay_in_float32_under_autocast() -> None:
    real, x = make("encoder"), torch.randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert real(x).carry.dtype == torch.float32


def test_gradients_flow_down_the_chain() -> None:
    lower, upper = (make("encoder", layer=layer) for layer in range(2))
    x = torch.randn(2, 7, 32)
    upper(x, carry=lower(x).carry).output.sum().backward()
    assert lower.q_proj.weight.grad.any()
