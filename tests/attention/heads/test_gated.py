"""Gated heads: the equation by loops, the limits of the gate, which vectors compute it, and which options exist."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Inputs, build
from mtkit.attention.contract import Site
from mtkit.attention.heads.gated import Gated

ROLES = ["encoder", "decoder", "cross"]


def make(name: str = "gated", role: str = "encoder", **arguments: Any) -> Any:
    return build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).double().eval()


def inputs(role: str) -> tuple[Tensor, Tensor | None]:
    return torch.randn(2, 7, 32).double(), torch.randn(2, 5, 32).double() if role == "cross" else None


def heads_of(attention: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    """Concatenated heads (B, T, H*V), before the gate."""
    seen: list[Tensor] = []
    hook = attention.merge.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(x, memory)
    hook.remove()
    return seen[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_the_gate_is_the_equation_channel_by_channel(role: str, granularity: str) -> None:
    attention, (x, memory) = make(role=role, granularity=granularity, gate_bias=0.3), inputs(role)
    gate = attention.merge.gate_proj
    assert gate.weight.shape == ((32, 32) if granularity == "elementwise" else (4, 32))
    heads, output = heads_of(attention, x, memory), attention(x, memory).output
    for b, t in ((0, 0), (1, 6)):
        gated = torch.zeros(32).double()
        for channel in range(32):
            row = channel if granularity == "elementwise" else channel // 8
            gated[channel] = heads[b, t, channel] / (1 + torch.exp(-(gate.weight[row] @ x[b, t] + 0.3)))
        torch.testing.assert_close(output[b, t], attention.out_proj(gated))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_an_open_gate_is_full_and_a_gate_at_zero_is_half_of_it(role: str, granularity: str) -> None:
    attention, full, (x, memory) = make(role=role, granularity=granularity), make("full", role), inputs(role)
    attention.adopt(full.state_dict())
    torch.nn.init.zeros_(attention.merge.gate_proj.weight)
    half, bias = attention(x, memory).output - full.out_proj.bias, full.out_proj.bias
    torch.testing.assert_close(2 * half, full(x, memory).output - bias)
    attention.merge.gate_proj.bias.data.fill_(30.0)
    torch.testing.assert_close(attention(x, memory).output, full(x, memory).output, rtol=0, atol=1e-10)


def test_the_bias_starts_as_the_option_says() -> None:
    assert torch.equal(make(gate_bias=4.0).merge.gate_proj.bias, torch.full((32,), 4.0).double())
    assert not make().merge.gate_proj.bias.any()


def test_steps_of_hypotheses_have_gates_of_their_own() -> None:
    """Both layouts of a step: hypotheses as queries of a segment, and each as a segment of its own."""
    merge = Gated(Site("decoder", 32, 4), 8).double()
    heads, query = torch.randn(2, 4, 3, 8).double(), torch.randn(2, 3, 32).double()
    expected = merge(heads, query)
    rows = heads.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # (B*N, H, 1, V)
    torch.testing.assert_close(merge(rows, query).view(2, 3, 32), expected)
    other = query.clone()
    other[1, 2] += 1
    assert (merge(heads, other) != expected).any(-1).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("name", ["hard-coded", "synthesizer"])
@torch.no_grad()
def test_a_cross_role_by_position_alone_reads_the_query_for_its_gates(name: str) -> None:
    assert not make(name, "cross").reads_query
    attention = make(name, "cross", merge="gated")
    assert attention.reads_query
    query, memory = torch.randn(2, 3, 32).double(), torch.randn(2, 5, 32).double()
    state, _ = attention.start(2, memory, hypotheses=3)
    stepped, _ = attention.step(query, state)
    for hypothesis in range(3):
        expected = attention(query[:, hypothesis : hypothesis + 1], memory).output
        torch.testing.assert_close(stepped.output[:, hypothesis : hypothesis + 1], expected)


def test_the_learned_gate_is_its_mean_over_real_tokens() -> None:
    attention, x = make(granularity="headwise"), torch.randn(1, 2, 32).double()
    gates = attention.merge.gate_proj(x[0]).sigmoid()
    numbers = attention.learned_numbers(Inputs(x, query_valid=torch.tensor([[True, False]])))
    torch.testing.assert_close(numbers["gate"].double(), gates[0], rtol=1e-6, atol=1e-6)
    assert "gate" not in attention.learned_numbers()
