"""Gated random feature attention: its recurrence, gates that learn, and a state that does not grow."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.errors import MtkitError
from tests.attention.small import maker

make = maker("rfa-gated", "decoder")


def recurrence(rfa: Any, x: Tensor) -> Tensor:
    """S_t = g_t S_t-1 + (1 - g_t) phi(k_t) v_t^T and z_t likewise, one position after the other, for x (B, T, D)."""
    k, v = rfa.keys_values(x)
    phi_q, phi_k = (rfa._features(each).features for each in (rfa.queries(x), k))
    gates = (x @ rfa.gate.weight.T + rfa.gate.bias).sigmoid().transpose(1, 2)  # (B, H, T)
    sums, ones, outputs = 0.0, 0.0, []
    for t in range(x.shape[1]):
        g = gates[:, :, t, None]
        sums = g[..., None] * sums + (1 - g[..., None]) * phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        ones = g * ones + (1 - g) * phi_k[:, :, t]
        read = (phi_q[:, :, t, :, None] * sums).sum(-2)
        outputs.append(read / (phi_q[:, :, t] * ones).sum(-1, keepdim=True))
    output: Tensor = rfa.out_proj(torch.stack(outputs, 2).transpose(1, 2).flatten(2))
    return output


@pytest.mark.parametrize("length", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("feature_map", ["sine", "arc-cosine"])
def test_forward_is_the_recurrence_with_gradients(length: int, feature_map: str) -> None:
    rfa = make(feature_map=feature_map, chunk=4, features=200).double()
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    outputs = rfa(x).output, recurrence(rfa, x)
    torch.testing.assert_close(*outputs)
    weight = torch.randn_like(outputs[0])
    wanted = [x, rfa.gate.weight, rfa.gate.bias, rfa.sigma, rfa.k_proj.weight, rfa.v_proj.weight]
    got, expected = (torch.autograd.grad((each * weight).sum(), wanted) for each in outputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert length == 1 or got[1].abs().max() > 1e-6


@torch.no_grad()
def test_a_gate_that_never_moves_and_keeps_almost_all_is_the_ungated_sum() -> None:
    """g = 1 - 1e-7: each of a few keys has the same weight but for 1e-6 of it."""
    gated, plain = make().double(), make(name="rfa", features=64).double()
    plain.load_state_dict(gated.state_dict(), strict=False)
    gated.gate.weight.zero_()
    gated.gate.bias.fill_(math.log(1e7))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(gated(x).output, plain(x).output, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_gate_that_closes_leaves_the_newest_value_alone() -> None:
    gated, full = make().double(), make(name="full").double()
    gated.adopt(full.state_dict())
    gated.gate.weight.zero_()
    gated.gate.bias.fill_(-40.0)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(gated(x).output, full.out_proj(full.v_proj(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [-30.0, 0.0, 12.0, 30.0])
@torch.no_grad()
def test_a_first_token_is_its_value_whatever_its_gate(gate: float) -> None:
    gated, x = make(features=500), torch.randn(20, 3, 32)
    gated.gate.bias.fill_(gate)
    wanted = gated.out_proj(gated.v_proj(x))[:, :1]
    state, _ = gated.start(20)
    attended, _ = gated.step(x[:, :1], state)
    for output in (gated(x).output[:, :1], gated(x[:, :1]).output, attended.output):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_keys_fade_by_the_gate_with_their_distance() -> None:
    """With keys that are all alike a value's weight is (1 - g) g^distance, normalised."""
    gated = make(heads=1, d_model=4).double()
    for projection in (gated.k_proj, gated.gate):
        projection.weight.zero_()
    for projection in (gated.v_proj, gated.out_proj):
        projection.weight.copy_(torch.eye(4))
    x = torch.randn(1, 12, 4, dtype=torch.float64)
    powers = 0.9 ** torch.arange(11, -1, -1, dtype=torch.float64)
    wanted = (powers[:, None] * x[0]).sum(0) / powers.sum()
    torch.testing.assert_close(gated(x).output[0, -1], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_beyond_float32_gives_no_nan() -> None:
    gated, x = make(chunk=3), torch.randn(2, 8, 32)
    for bias in (200.0, -200.0):
        gated.gate.bias.fill_(bias)
        assert gated(x).output.isfinite().all()


@torch.no_grad()
def test_the_state_takes_as_many_bytes_at_step_2000_as_at_step_10() -> None:
    gated = make(d_model=8, heads=2, features=3)
    state, _ = gated.start(1)
    sizes = {}
    for step in range(1, 2001):
        attended, state = gated.step(torch.randn(1, 1, 8), state)
        if step in (10, 2000):
            sizes[step] = sum(x.untyped_storage().nbytes() for x in state.values() if torch.is_tensor(x))
    assert sizes[10] == sizes[2000]
    assert state["count"] == 2000
    assert attended.output.isfinite().all()


def test_gates_start_at_a_mean_of_nine_tenths_unless_said() -> None:
    assert make().gate.bias.sigmoid().tolist() == pytest.approx([0.9] * 4, abs=1e-4)
    assert make(gate_bias=0.0).gate.bias.tolist() == [0.0] * 4


def test_only_a_decoder_has_an_order_to_forget_in() -> None:
    for role in ("encoder", "cross"):
        with pytest.raises(MtkitError, match="it can play: decoder"):
            make(role=role)
    with pytest.raises(MtkitError, match="gate_bias = 50"):
        make(gate_bias=50.0)
