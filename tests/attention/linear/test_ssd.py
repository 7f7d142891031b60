"""State space duality: the matrix of the paper from the raw weights, both entries of the step, and its limits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.linear._decayed_sums import read_causal
from mtkit.attention.linear._learned_rates import first_biases, first_rates
from tests.attention.small import maker, refusals, tokens

BARE = {"norm": "none", "output_gate": "none", "short_conv": 0}

make = maker("ssd", "decoder", double=True, seed=0, chunk=5)


def mixed(ssd: Any, x: Tensor, *, flip: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """C, B and X after PyTorch's convolution and SiLU, (B, groups, T, N) and (B, H, T, V)."""
    joined = torch.cat([linear(x) for linear in (ssd.q_proj, ssd.k_proj, ssd.v_proj)], -1)
    if ssd.convolution is not None:
        joined = joined.flip(1) if flip else joined
        kernel = ssd.convolution.weight.flip(0).T.unsqueeze(1)
        taps = kernel.shape[2]
        joined = F.conv1d(F.pad(joined.mT, (taps - 1, 0)), kernel, ssd.convolution.bias, groups=joined.shape[2]).mT
        joined = joined.flip(1) if flip else joined
    joined = joined * joined.sigmoid()
    widths = [linear.out_features for linear in (ssd.q_proj, ssd.k_proj, ssd.v_proj)]
    c, b, v = joined.split(widths, -1)
    groups, state = ssd.projection.key_heads, ssd.projection.key_width
    c, b = (part.unflatten(-1, (groups, state)).transpose(1, 2).repeat_interleave(4 // groups, 1) for part in (c, b))
    return c, b, v.unflatten(-1, (4, -1)).transpose(1, 2)


def matrix(ssd: Any, x: Tensor, *, flip: bool = False) -> Tensor:
    """M (B, H, T, T), one entry after the other; above the diagonal where the scan runs from the end."""
    c, b, _ = mixed(ssd, x, flip=flip)
    steps = F.softplus(ssd.step_proj(x)).transpose(1, 2)
    rates, length = ssd.log_rate.exp().view(1, 4), x.shape[1]
    rows = torch.zeros(len(x), 4, length, length, dtype=x.dtype)
    for t in range(length):
        for s in range(t + 1, length) if flip else range(t + 1):
            between = steps[:, :, t:s] if flip else steps[:, :, s + 1 : t + 1]
            share = (-rates * between.sum(-1)).exp() * steps[:, :, s]
            rows[:, :, t, s] = (c[:, :, t] * b[:, :, s]).sum(-1) * share
    return rows


@pytest.mark.parametrize(
    "options", [{}, {"groups": 2, "state_width": 5, "value_expand": 2.0}, {"skip": False, "short_conv": 0}]
)
@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_it_is_the_matrix_of_the_paper(role: str, options: dict[str, Any]) -> None:
    ssd, x = make(role, **options), tokens(2, 12)
    _, _, v = mixed(ssd, x)
    heads = matrix(ssd, x) @ v
    if role == "encoder":
        heads = heads + matrix(ssd, x, flip=True) @ mixed(ssd, x, flip=True)[2]
    if options.get("skip", True):
        ssd.skip.copy_(torch.arange(4.0))
        heads = heads + torch.arange(4.0).view(4, 1, 1) * v
    gate = x @ ssd.gate_proj.weight.T
    rows = heads.transpose(1, 2).flatten(2) * gate * gate.sigmoid()
    rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * ssd.norm.weight
    torch.testing.assert_close(ssd(x).output, ssd.out_proj(rows), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_without_a_rate_it_sums_steps_times_values() -> None:
    ssd, x = make(**BARE), tokens(2, 13)
    ssd.log_rate.fill_(-60.0)
    c, b, v = mixed(ssd, x)
    steps = F.softplus(ssd.step_proj(x)).transpose(1, 2).unsqueeze(-1)
    heads = (c @ b.mT).tril() @ (steps * v) + v
    torch.testing.assert_close(ssd(x).output, ssd.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_a_constant_step_is_retention() -> None:
    """With gamma = exp(-e^A D) and queries and keys after SiLU, times D sqrt(K)."""
    ssd, retention, x = make(**BARE, skip=False, state_width=8), make(name="retention", rotary=False), tokens(2, 13)
    ssd.step_proj.weight.zero_()
    ssd.step_proj.bias.fill_(0.3)
    step = F.softplus(torch.tensor(0.3, dtype=torch.float64))
    gamma = 1 - 2.0 ** -(5 + torch.arange(4, dtype=torch.float64))
    ssd.log_rate.copy_((-gamma.log() / step).log())
    terms = retention.terms(*mixed(ssd, x), x)
    retention.norm = retention.gate_proj = None
    retention.out_proj.load_state_dict(ssd.out_proj.state_dict())
    heads = step * 8**0.5 * read_causal(terms, 4)
    torch.testing.assert_close(ssd(x).output, retention.finished(heads, terms.v, x))


@torch.no_grad()
def test_without_keys_a_head_gives_its_value() -> None:
    ssd, x = make(**BARE), tokens(2, 5)
    ssd.k_proj.weight.zero_()
    ssd.k_proj.bias.zero_()
    v = F.silu(ssd.v_proj(x))
    torch.testing.assert_close(ssd(x).output, ssd.out_proj(v))


def test_first_steps_are_from_a_thousandth_to_a_tenth_and_rates_from_1_to_16() -> None:
    steps, rates = F.softplus(first_biases(1000)), first_rates(1000).exp()
    assert 0.00099 < steps.min() < 0.0015
    assert 0.08 < steps.max() < 0.1001
    assert 1 <= rates.min() < 1.2
    assert 15.5 < rates.max() <= 16.001
    assert steps.log().mean() == pytest.approx(-4.6, abs=0.15)


@torch.no_grad()
def test_the_state_of_a_head_is_its_sums_and_the_last_inputs() -> None:
    ssd = make(state_width=6)
    state, _ = ssd.start(2, hypotheses=3)
    for _ in range(20):
        _, state = ssd.step(torch.randn(2, 3, 32, dtype=torch.float64), state)
    assert state["recent"]["past"]["shared"]["sums"].shape == (2, 3, 4, 6, 8)
    assert state["inputs"].shape == (2, 3, 3, 6 + 6 + 32)
    assert set(state) == {"recent", "inputs", "count"}


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "cross"}, "it can play: encoder, decoder"),
    ({"groups": 3}, "groups = 3 must divide the 4 heads"),
    ({"state_width": 0}, "state_width = 0"),
    ({"short_conv": 65}, "short_conv = 65"),
    ({"projection": "multi-query"}, "projection"),
)
