"""Retention: the paper's matrix of decays, its limits, and a norm that reads one head of one token."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.positions import Rotary
from tests.attention.small import maker, refusals, tokens

BARE = {"norm": "none", "output_gate": "none"}

make = maker("retention", "decoder", double=True, seed=0, chunk=5)


def heads_of(linear: Any, x: Tensor) -> Tensor:
    return linear(x).unflatten(-1, (4, -1)).transpose(1, 2)


def equation(retention: Any, x: Tensor, decays: Tensor, *, rotary: bool) -> Tensor:
    """((Q K^T / sqrt K) * D) V, (B, H, T, V), with D (H, T, T)."""
    q, k, v = (heads_of(linear, x) for linear in (retention.q_proj, retention.k_proj, retention.v_proj))
    if rotary:
        place = torch.arange(x.shape[1])
        q, k = (Rotary(retention.site, q.shape[-1]).rotate(part, place) for part in (q, k))
    heads: Tensor = (q @ k.mT * q.shape[-1] ** -0.5 * decays) @ v
    return heads


def decays(length: int, role: str, base: float = 5.0) -> Tensor:
    gamma = 1 - 2.0 ** -(base + torch.arange(4, dtype=torch.float64))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    matrix = gamma.view(4, 1, 1) ** distance.abs()
    return matrix if role == "encoder" else matrix.tril()


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("rotary", [True, False])
@torch.no_grad()
def test_it_is_the_equation_of_the_paper(role: str, rotary: bool) -> None:
    retention, x = make(role, rotary=rotary), tokens(2, 13)
    heads = equation(retention, x, decays(13, role), rotary=rotary)
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * retention.norm.weight
    gate = x @ retention.gate_proj.weight.T
    wanted = retention.out_proj(gate * gate.sigmoid() * normed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(retention(x).output, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_a_base_beyond_the_precision_sums_over_all_tokens(role: str) -> None:
    retention = make(role, decay_base=60.0, rotary=False, **BARE)
    x, ones = tokens(2, 13), torch.ones(4, 13, 13, dtype=torch.float64)
    heads = equation(retention, x, ones if role == "encoder" else ones.tril(), rotary=False)
    torch.testing.assert_close(retention(x).output, retention.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_one_token_reads_itself() -> None:
    for role in ("encoder", "decoder"):
        retention, x = make(role, **BARE), tokens(3, 1)
        heads = equation(retention, x, torch.ones(4, 1, 1, dtype=torch.float64), rotary=False)
        torch.testing.assert_close(retention(x).output, retention.out_proj(heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_heads_keep_their_rate_after_a_cast_to_bfloat16() -> None:
    """A rate of 1 - 2^-8 is 1 in bfloat16."""
    retention = make(**BARE, rotary=False).bfloat16()
    q = torch.ones(1, 4, 2, 8)
    rates = retention.terms(q, q, q, q).decay[0, :, 0, 0].exp()
    torch.testing.assert_close(rates, 1 - 2.0 ** -torch.arange(5.0, 9.0))


@torch.no_grad()
def test_the_norm_is_over_one_head_of_one_token() -> None:
    """PyTorch's group norm over (B, H V, T) would take its statistics from later tokens, too."""
    retention, x = make(), tokens(2, 9)
    heads = equation(retention, x, decays(9, "decoder"), rotary=True).transpose(1, 2)
    normed = retention.norm(heads)
    rms = F.rms_norm(heads[1, 4, 2], (8,), eps=1e-5)
    torch.testing.assert_close(normed[1, 4, 2], rms)
    layer = make(norm="layer").norm(heads)
    torch.testing.assert_close(layer[1, 4, 2], F.layer_norm(heads[1, 4, 2], (8,), eps=1e-5))


@pytest.mark.parametrize("key_expand", [0.5, 1.0])
@torch.no_grad()
def test_widths_follow_the_options_and_so_does_the_state(key_expand: float) -> None:
    retention = make(key_expand=key_expand, value_expand=2.0, short_conv=3)
    keys = round(8 * key_expand)
    state, _ = retention.start(2, hypotheses=3)
    assert state["inputs"].shape == (2, 3, 2, 4 * (2 * keys + 16))
    for _ in range(20):
        _, state = retention.step(tokens(2, 3), state)
    assert state["recent"]["past"]["shared"]["sums"].shape == (2, 3, 4, keys, 16)
    assert state["inputs"].shape == (2, 3, 2, 4 * (2 * keys + 16))


@torch.no_grad()
def test_the_convolution_runs_in_the_direction_of_its_scan() -> None:
    """The encoder is the decoder's form, and that of the flipped text without the token itself."""
    options: dict[str, Any] = {**BARE, "short_conv": 3, "rotary": False}
    encoder, decoder, x = make("encoder", **options), make("decoder", **options), tokens(2, 13)
    decoder.load_state_dict(encoder.state_dict())
    back = decoder(x.flip(1)).output.flip(1)
    taps = encoder.convolution.weight.flip(0)
    near = F.pad(torch.cat([p(x) for p in (encoder.q_proj, encoder.k_proj, encoder.v_proj)], -1), (0, 0, 0, 2))
    mixed = F.silu(sum(tap * near[:, place : place + 13] for place, tap in enumerate(taps.flip(0))))
    q, k, v = (part.unflatten(-1, (4, 8)) for part in mixed.split(32, dim=-1))
    itself = ((q * k).sum(-1, keepdim=True) * 8**-0.5 * v).flatten(2)
    wanted = decoder(x).output + back - decoder.out_proj(itself)
    torch.testing.assert_close(encoder(x).output, wanted)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "cross"}, "it can play: encoder, decoder"),
    ({"decay_base": 0.5}, "decay_base = 0.5"),
    ({"norm": "rsm"}, "did you mean 'rms'"),
    ({"output_gate": "relu"}, "output_gate = 'relu'"),
    ({"positions": "rotary"}, "positions"),
    ({"merge": "em-routing"}, "merge"),
)
