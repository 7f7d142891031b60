"""Forgetting attention: which gates act on which pair, its limits, long sums, and the norms of queries and keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.positions import _slopes
from tests.attention.small import VALID, maker

ROLES = ["encoder", "decoder"]

make = maker("forgetting", "decoder", double=True)


def with_gates(attention: Any, gates: Tensor) -> None:
    """Makes the gates (T,) those of all heads, whatever the tokens are."""
    logits = gates.double().logit().view(1, -1, 1).expand(-1, -1, attention.site.heads)
    attention.log_gates = lambda tokens: torch.nn.functional.logsigmoid(logits).expand(len(tokens), -1, -1)


@pytest.mark.parametrize("role", ROLES)
def test_with_gates_that_are_open_it_is_full_attention(role: str) -> None:
    attention, full, x = make(role, gate_bias=30.0), make(role, "full"), torch.randn(2, 7, 32).double()
    attention.adopt(full.state_dict())
    torch.nn.init.zeros_(attention.forget_proj.weight)
    torch.testing.assert_close(
        attention(x, query_valid=VALID).output[VALID], full(x, query_valid=VALID).output[VALID], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("role", ROLES)
def test_with_constant_gates_it_is_full_attention_with_alibi(role: str) -> None:
    attention, full, x = make(role), make(role, "full", positions="alibi"), torch.randn(2, 7, 32).double()
    attention.adopt(full.state_dict())
    torch.nn.init.zeros_(attention.forget_proj.weight)
    attention.forget_proj.bias.data = torch.exp(-_slopes(4, x.device)).double().logit()
    torch.testing.assert_close(
        attention(x, query_valid=VALID).output[VALID], full(x, query_valid=VALID).output[VALID], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("role", ROLES)
def test_the_gate_of_the_query_acts_and_that_of_the_key_does_not(role: str) -> None:
    """With equal scores the weights are the products of the gates between: here by hand for three tokens."""
    attention, x = make(role), torch.randn(1, 3, 32).double()
    torch.nn.init.zeros_(attention.k_proj.weight)
    with_gates(attention, torch.tensor([0.125, 0.25, 0.5]))
    products = {
        "decoder": [[1.0, 0.0, 0.0], [0.25, 1.0, 0.0], [0.125, 0.5, 1.0]],
        "encoder": [[1.0, 0.25, 0.125], [0.25, 1.0, 0.5], [0.125, 0.5, 1.0]],
    }
    expected = torch.tensor(products[role]).double()
    weights = attention(x, need_weights=True).weights
    torch.testing.assert_close(weights, (expected / expected.sum(-1, keepdim=True)).expand(1, 4, 3, 3))


def test_a_closed_gate_forgets_all_before_its_token_and_nothing_after() -> None:
    attention, x = make(), torch.randn(1, 6, 32).double()
    with_gates(attention, torch.tensor([0.9, 0.9, 0.9, 1e-12, 0.9, 0.9]))
    weights = attention(x, need_weights=True).weights
    output = attention(x).output[:, 3:]
    assert weights[:, :, 3:, :3].max() < 1e-8
    with_gates(attention, torch.full((3,), 0.9))
    torch.testing.assert_close(attention(x[:, 3:]).output, output, rtol=0, atol=1e-8)


def test_one_token_is_its_own_value() -> None:
    attention, x = make(), torch.randn(2, 1, 32).double()
    torch.testing.assert_close(attention(x).output, attention.out_proj(attention.v_proj(x)))


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_sums_of_thousands_keep_the_differences_of_neighbours(role: str) -> None:
    """c reaches -6000, where float32 has steps of 5e-4."""
    exact = make(role, d_model=8, heads=1, gate_bias=-4.0)
    rough, x = make(role, d_model=8, heads=1).float(), torch.randn(1, 1500, 8)
    rough.load_state_dict(exact.state_dict())
    weights = [each(x.to(each.q_proj.weight), need_weights=True).weights[0, 0, -9:] for each in (exact, rough)]
    torch.testing.assert_close(weights[1].double(), weights[0], rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("positions", [None, "rotary"])
def test_norms_of_heads_come_before_rotations(positions: str | None) -> None:
    attention, x = make(qk_norm=True, positions=positions), torch.randn(1, 5, 32).double()
    torch.nn.init.normal_(attention.q_norm.weight)
    q = attention.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    expected = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.q_norm.weight
    if positions:
        expected = attention.positions.rotate(expected, torch.arange(5))
    torch.testing.assert_close(attention.queries(x), expected)
    keys, _ = attention.keys_values(x)
    torch.testing.assert_close(keys.square().mean(-1), torch.ones(1, 4, 5).double(), rtol=1e-3, atol=1e-3)


def test_a_step_at_any_position_adds_one_number_per_head_to_the_cache() -> None:
    attention, x = make(), torch.randn(1, 3, 32).double()
    state, _ = attention.start(1)
    for t in range(3):
        _, state = attention.step(x[:, t : t + 1], state)
    assert {name: tuple(state[name].shape[2:]) for name in ("keys", "log_gates")} == {
        "keys": (4, state["keys"].shape[3], 8),
        "log_gates": (4, state["keys"].shape[3], 1),
    }
