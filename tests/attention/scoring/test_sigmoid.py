"""Sigmoid attention: the bias of a row by hand, its limits, and the norms."""

import math

import pytest
import torch
from torch import Tensor

from tests.attention.small import ROLES, VALID, maker

make = maker("sigmoid", double=True)


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    memory = torch.randn(2, 7, 32).double() if role == "cross" else None
    return torch.randn(2, 7, 32).double(), memory, {"memory_valid" if role == "cross" else "query_valid": VALID}


def seen_by(role: str) -> Tensor:
    """(B, 1, T, S)."""
    if role == "decoder":
        return torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    return VALID[:, None, None].expand(2, 1, 7, 7)


@pytest.mark.parametrize("role", ROLES)
def test_without_scores_n_keys_weigh_one_by_n_plus_1_each(role: str) -> None:
    """sigmoid(-log n) = 1 / (1 + n): the output is n / (n + 1) times the mean of the values."""
    attention, (x, memory, masks), seen = make(role), inputs(role), seen_by(role)
    torch.nn.init.zeros_(attention.q_proj.weight)
    count = seen.sum(-1, keepdim=True)
    weights = attention(x, memory, **masks, need_weights=True).weights
    torch.testing.assert_close(weights, (seen / (1.0 + count)).expand(2, 4, 7, 7).double())


@pytest.mark.parametrize("role", ROLES)
def test_rescaled_weights_tend_to_those_of_full_attention_with_a_low_bias(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, bias=-15.0), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    weights, expected = (each(x, memory, **masks, need_weights=True).weights for each in (attention, full))
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-4)
    attention.bias = 0.0
    weights = attention(x, memory, **masks, need_weights=True).weights
    assert (weights / weights.sum(-1, keepdim=True) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_token_is_a_part_of_its_value(role: str) -> None:
    attention, x = make(role), torch.randn(1, 1, 32).double()
    q, k, v = (linear(x).view(4, 8) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    expected = (torch.sigmoid((q * k).sum(-1, keepdim=True) / math.sqrt(8)) * v).view(1, 1, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(expected))


@pytest.mark.parametrize("role", ROLES)
def test_the_bias_may_be_a_number(role: str) -> None:
    attention, (x, memory, masks), seen = make(role, bias=-7.62), inputs(role), seen_by(role)
    torch.nn.init.zeros_(attention.q_proj.weight)
    weights = attention(x, memory, **masks, need_weights=True).weights
    expected = seen / (1.0 + math.exp(7.62))
    torch.testing.assert_close(weights, expected.expand(2, 4, 7, 7).double())


def test_a_step_counts_the_keys_so_far() -> None:
    attention, x = make("decoder"), torch.randn(1, 5, 32).double()
    torch.nn.init.zeros_(attention.q_proj.weight)
    state, _ = attention.start(1)
    for t in range(5):
        attended, state = attention.step(x[:, t : t + 1], state, need_weights=True)
        torch.testing.assert_close(attended.weights, torch.full((1, 4, 1, t + 1), 1 / (t + 2)).double())


def test_the_output_norm_is_over_the_merged_heads_and_before_out_proj() -> None:
    attention, (x, _, masks) = make(output_norm=True), inputs("encoder")
    attention.output_norm.weight.data.normal_()
    seen: list[Tensor] = []
    attention.out_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(x, **masks)
    merged = seen[0] / attention.output_norm.weight
    torch.testing.assert_close(merged.square().mean(-1), torch.ones(2, 7).double(), rtol=1e-2, atol=1e-2)


def test_norms_of_queries_and_keys_bound_the_scores() -> None:
    """Each has the norm sqrt(K), so that a score is at most sqrt(K)."""
    attention, (x, _, masks) = make(qk_norm=True, bias=0.0), inputs("encoder")
    weights = attention(1000 * x, **masks, need_weights=True).weights[0]
    assert weights.max() <= torch.sigmoid(torch.tensor(8**0.5))
    assert weights.min() >= torch.sigmoid(-torch.tensor(8**0.5))
