"""Gaussian attention: the bell by hand, where it is full attention, and what the absolute value is for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.small import maker, refusals

ROLES = ["encoder", "decoder"]
VALID = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])

make = maker("gaussian")


def without_products(attention: Any) -> Any:
    """Scores are zero, so that the bell alone makes the weights."""
    torch.nn.init.zeros_(attention.q_proj.weight)
    return attention


def weights_of(attention: Any, x: Tensor) -> Tensor:
    weights: Tensor = attention(x, query_valid=VALID[: len(x), : x.shape[1]], need_weights=True).weights
    return weights


def test_the_bell_at_its_start_is_that_of_the_equation() -> None:
    table = make().table(torch.arange(6))
    torch.testing.assert_close(table, torch.tensor([-0.5, -0.4, -0.1, -0.4, -1.1, -2.0]).expand(4, 6))


@pytest.mark.parametrize("role", ROLES)
def test_the_bell_is_around_the_query(role: str) -> None:
    weights = weights_of(without_products(make(role)), torch.randn(1, 9, 32))
    bell = [math.exp(-abs(0.1 * d * d - 0.5)) for d in range(9)]
    for i in (0, 3, 8):
        row = torch.tensor([bell[abs(i - j)] if role == "encoder" or j <= i else 0.0 for j in range(9)])
        torch.testing.assert_close(weights[0, :, i], (row / row.sum()).expand(4, 9))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("slots", [{}, {"positions": "alibi"}, {"projection": "multi-query"}])
def test_without_a_bell_it_is_full_attention(role: str, slots: dict[str, str]) -> None:
    attention, full, x = make(role, **slots), make(role, "full", **slots), torch.randn(2, 9, 32)
    full.load_state_dict({name: value for name, value in attention.state_dict().items() if "raw" not in name})
    expected = full(x, query_valid=VALID).output[VALID]
    assert (attention(x, query_valid=VALID).output[VALID] - expected).abs().max() > 1e-3
    for raw in (attention.raw_w, attention.raw_b):
        torch.nn.init.constant_(raw, -100)
    torch.testing.assert_close(attention(x, query_valid=VALID).output[VALID], expected, rtol=1e-5, atol=1e-5)


def test_the_difference_to_full_attention_falls_with_the_bell() -> None:
    full, x, apart = make(name="full").double(), torch.randn(2, 9, 32).double(), []
    for size in (1e-3, 1e-4):
        attention = make(initial_w=size, initial_b=-size).double()
        attention.adopt(full.state_dict())
        apart.append((attention(x).output - full(x).output).abs().max())
    torch.testing.assert_close(apart[0] / apart[1], torch.tensor(10.0).double(), rtol=0.1, atol=0)


def test_a_narrow_bell_leaves_the_token_itself() -> None:
    attention, x = make(initial_w=50.0, initial_b=-1e-6), torch.randn(2, 9, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(attention.v_proj(x)), rtol=1e-5, atol=1e-5)


def test_the_bias_moves_the_peak_away_from_the_token_and_learns() -> None:
    """Without the absolute value it would cancel in the softmax."""
    attention, x = without_products(make(initial_w=0.1, initial_b=-0.9)), torch.randn(1, 9, 32)
    weights = weights_of(attention, x)[0, 0, 4]
    assert weights.argsort(descending=True)[:2].sort().values.tolist() == [1, 7]  # at distance sqrt(0.9 / 0.1)
    (attention(x).output * torch.randn(1, 9, 32)).sum().backward()
    assert attention.raw_b.grad.abs().min() > 1e-4


def test_heads_have_a_bell_each_or_share_one() -> None:
    own, shared = make(), make(shared_heads=True)
    assert own.raw_w.shape == own.raw_b.shape == (4, 1)
    assert shared.raw_w.shape == shared.raw_b.shape == (1, 1)
    x = torch.randn(1, 9, 32)
    torch.testing.assert_close(weights_of(without_products(own), x), weights_of(without_products(shared), x))
    torch.nn.init.normal_(own.raw_w)
    weights = weights_of(own, x)
    assert not torch.allclose(weights[:, 0], weights[:, 1], atol=1e-3)


def test_the_bell_is_of_float32_under_autocast_at_any_distance() -> None:
    attention, x = without_products(make("decoder", max_length=400)), torch.randn(1, 400, 32)
    expected = attention(x, need_weights=True).weights
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention(x, need_weights=True).weights
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


test_what_means_nothing_is_refused = refusals(
    make,
    ({"initial_w": 0.0}, "initial_w = 0.0 must"),
    ({"initial_b": 0.5}, "initial_b = 0.5 must"),
    ({"role": "cross"}, "encoder, decoder"),
)
