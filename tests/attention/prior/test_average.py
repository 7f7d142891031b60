"""Average attention: its limit, its gates, and its constant step."""

from typing import Any

import pytest
import torch

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.small import maker

make = maker("average", "decoder")


def test_without_network_and_gate_it_is_full_attention_with_uniform_weights() -> None:
    """W_Q = W_K = 0, W_V = W_O = I."""
    full, x = build("full", role="decoder", d_model=32, heads=4), torch.randn(2, 9, 32)
    with torch.no_grad():
        full.get_submodule("q_proj").weight.zero_()  # type: ignore[operator,union-attr]
        for name in ("v_proj", "out_proj"):
            full.get_submodule(name).weight.copy_(torch.eye(32))  # type: ignore[operator,union-attr]
    average = make(ffn=False, gate=False)
    assert not list(average.parameters())
    torch.testing.assert_close(average(x).output, full(x).output, rtol=1e-5, atol=1e-5)


def test_gates_of_zero_take_half_of_both() -> None:
    average, x = make(ffn=False), torch.randn(2, 9, 32)
    with torch.no_grad():
        average.gates.weight.zero_()
    mean = x.cumsum(1) / torch.arange(1, 10).unsqueeze(-1)
    torch.testing.assert_close(average(x).output, 0.5 * (x + mean))


def test_the_input_gate_comes_first_and_both_see_both_vectors() -> None:
    average, x = make(ffn=False), torch.randn(2, 9, 32)
    mean = x.cumsum(1) / torch.arange(1, 10).unsqueeze(-1)
    with torch.no_grad():
        average.gates.bias[:32], average.gates.bias[32:] = 100.0, -100.0
    torch.testing.assert_close(average(x).output, x)
    with torch.no_grad():
        average.gates.bias.neg_()
    torch.testing.assert_close(average(x).output, mean)


@pytest.mark.parametrize("options", [{}, {"ffn": False}, {"gate": False}, {"inner": 7}])
def test_forward_is_the_equation_written_out(options: dict[str, Any]) -> None:
    average, x = make(**options).double(), torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(average(x).output, average.naive(x).output)


def test_the_network_is_four_times_as_wide_unless_told() -> None:
    assert make().feed_forward[0].out_features == 128
    assert make(inner=7).feed_forward[0].out_features == 7


@torch.no_grad()
def test_a_sum_of_bfloat16_tokens_is_kept_in_float32() -> None:
    """Step by step and at once, the mean of 1 and 3 stays 2 after more tokens than bfloat16 counts."""
    average = make(ffn=False, gate=False)
    tokens = torch.tensor([1.0, 3.0]).repeat(300).view(1, 600, 1).expand(-1, -1, 32).bfloat16()
    state, _ = average.start(1)
    for token in tokens.unbind(1):
        attended, state = average.step(token.unsqueeze(1), state)
    assert torch.equal(attended.output, torch.full((1, 1, 32), 2.0).bfloat16())
    assert torch.equal(average(tokens).output[:, -1], attended.output[:, 0])
    assert state["total"].shape == (1, 1, 32)


@torch.no_grad()
def test_prefix_sums_of_bfloat16_tokens_are_not_rounded() -> None:
    """Means of positive numbers are rounded once, to 8 bits; sums in bfloat16 would be rounded before."""
    tokens = torch.rand(2, 600, 32).bfloat16()
    output = make(ffn=False, gate=False)(tokens).output
    means = tokens.double().cumsum(1) / torch.arange(1, 601).unsqueeze(1)
    torch.testing.assert_close(output.double(), means, rtol=1.01 * 2**-8, atol=0)


def test_nothing_of_full_is_taken_over_and_no_other_role_is_played() -> None:
    average = make()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    average.adopt(build("full", role="decoder", d_model=32, heads=4).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
    for role in ("encoder", "cross"):
        with pytest.raises(MtkitError, match="it can play: decoder"):
            make(role=role)
