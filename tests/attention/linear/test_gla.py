"""Gated linear attention: the recurrence from the raw weights, gates at their limits, and what a token forgets."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Inputs
from tests.attention.small import maker, refusals, tokens

BARE = {"norm": "none", "output_gate": "none"}

make = maker("gla", "decoder", double=True, seed=0, chunk=5, **BARE)


def gates(gla: Any, x: Tensor, temperature: float) -> Tensor:
    """(B, T, H, K)."""
    logits = x @ gla.decay_down.weight.T @ gla.decay_up.weight.T + gla.decay_up.bias
    return logits.sigmoid().pow(1 / temperature).unflatten(-1, (4, -1))


def scan(gla: Any, x: Tensor, temperature: float, *, excluding: bool) -> Tensor:
    """S_t = Diag(alpha_t) S_t-1 + k_t v_t^T, read after the write or, excluding it, before."""
    q, k, v = (linear(x).unflatten(-1, (4, -1)) for linear in (gla.q_proj, gla.k_proj, gla.v_proj))
    alpha, outputs = gates(gla, x, temperature), []
    sums = torch.zeros(len(x), 4, k.shape[-1], v.shape[-1], dtype=x.dtype)
    for t in range(x.shape[1]):
        kept = alpha[:, t, :, :, None] * sums
        sums = kept + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(((kept if excluding else sums) * q[:, t, :, :, None]).sum(-2) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, 1).flatten(2)


@pytest.mark.parametrize("temperature", [16.0, 0.5])
@pytest.mark.parametrize("key_expand", [1.0, 0.5, 0.125])
def test_it_is_the_recurrence_in_one_direction_and_in_two(temperature: float, key_expand: float) -> None:
    x = tokens(2, 13)
    for role in ("decoder", "encoder"):
        gla = make(role, gate_temperature=temperature, key_expand=key_expand)
        heads = scan(gla, x, temperature, excluding=False)
        if role == "encoder":
            heads = heads + scan(gla, x.flip(1), temperature, excluding=True).flip(1)
        outputs = gla(x).output, gla.out_proj(heads)
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)
        wanted, weight = [gla.decay_down.weight, gla.decay_up.bias, gla.k_proj.weight], torch.randn_like(outputs[0])
        got, expected = (torch.autograd.grad((each * weight).sum(), wanted) for each in outputs)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
            assert one.abs().max() > 1e-6


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_open_gates_are_retention_that_keeps_all(role: str) -> None:
    gla = make(role, gate_bias=60.0)
    retention = make(role, "retention", decay_base=60.0, rotary=False)
    retention.load_state_dict(gla.state_dict(), strict=False)
    gla.decay_up.weight.zero_()
    x = tokens(2, 13)
    torch.testing.assert_close(gla(x).output, retention(x).output)


@torch.no_grad()
def test_a_closed_gate_forgets_all_before_its_token() -> None:
    gla, x = make(gate_temperature=1.0), tokens(1, 13)
    gla.decay_up.weight.zero_()
    gla.decay_down.weight.zero_()
    gla.decay_up.weight[:, 0] = 1.0
    gla.decay_down.weight[0, 0] = 1.0
    x[:, :, 0] = 1.0
    x[:, 6, 0] = -1e6  # the gate's input
    torch.testing.assert_close(gla(x).output[:, 6:], gla(x[:, 6:]).output, rtol=1e-9, atol=1e-9)
    assert (gla(x).output[:, 5] - gla(x[:, 5:]).output[:, 0]).abs().max() > 1e-3


@torch.no_grad()
def test_the_first_gates_halve_what_is_sixteen_tokens_back() -> None:
    gla = make()
    gla.decay_up.weight.zero_()
    shares = gla.decays_of(tokens(1, 1)).exp()
    torch.testing.assert_close(shares, torch.full_like(shares, 0.5 ** (1 / 16)))
    learned = gla.learned_numbers(Inputs(tokens(2, 7)))["kept share"]
    torch.testing.assert_close(learned, torch.full_like(learned, 0.5 ** (1 / 16)))


@pytest.mark.parametrize("gate", [-100.0, 100.0])
@torch.no_grad()
def test_gates_beyond_float32_give_no_nan(gate: float) -> None:
    gla = make(gate_bias=gate, gate_temperature=1e-2).float()
    assert gla(100 * torch.randn(2, 70, 32)).output.isfinite().all()


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "cross"}, "it can play: encoder, decoder"),
    ({"gate_rank": 0}, "gate_rank = 0"),
    ({"gate_temperature": 0.0}, "gate_temperature = 0"),
    ({"key_expand": 16.0}, "key_expand = 16"),
    ({"positions": "alibi"}, "positions"),
)
