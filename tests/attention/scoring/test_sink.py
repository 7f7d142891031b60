"""Attention with a sink: full attention times a factor, its limits, and the two kinds of sinks."""

import pytest
import torch

from tests.attention.small import ROLES, VALID, inputs, maker

make = maker("sink", double=True)


@pytest.mark.parametrize("role", ROLES)
def test_weights_are_those_of_full_attention_times_a_sigmoid(role: str) -> None:
    """full * sigmoid(lse - z), from scores computed here."""
    attention, full, (x, memory, masks) = make(role), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    torch.nn.init.normal_(attention.sink)
    context = x if memory is None else memory
    q, k = (
        linear(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        for linear, tokens in ((full.q_proj, x), (full.k_proj, context))
    )
    seen = torch.ones(7, 7, dtype=torch.bool).tril() if role == "decoder" else VALID[:, None, None]
    total = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
    expected = full(x, memory, **masks, need_weights=True).weights * (total - attention.sink.view(4, 1, 1)).sigmoid()
    torch.testing.assert_close(attention(x, memory, **masks, need_weights=True).weights, expected)


@pytest.mark.parametrize("role", ROLES)
def test_a_low_sink_is_full_attention_and_a_high_one_attends_to_nothing(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, sink_init=-60.0), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    torch.testing.assert_close(attention(x, memory, **masks).output, full(x, memory, **masks).output)
    torch.nn.init.constant_(attention.sink, 60.0)
    output = attention(x, memory, **masks).output
    torch.testing.assert_close(output, attention.out_proj.bias.expand_as(output), rtol=0, atol=1e-12)


def test_a_zero_sink_adds_1_to_the_denominator_and_learns_nothing() -> None:
    attention, (x, _, masks) = make(kind="zero"), inputs("encoder")
    assert "sink" not in attention.state_dict()
    torch.nn.init.zeros_(attention.q_proj.weight)
    weights = attention(x, **masks, need_weights=True).weights
    expected = (VALID / (1.0 + VALID.sum(-1, keepdim=True)))[:, None, None].expand(2, 4, 7, 7)
    torch.testing.assert_close(weights, expected.double())


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_token_is_a_part_of_its_value(role: str) -> None:
    attention, x = make(role, sink_init=0.5), torch.randn(1, 1, 32).double()
    q, k, v = (linear(x).view(4, 8) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    expected = (torch.sigmoid((q * k).sum(-1, keepdim=True) / 8**0.5 - 0.5) * v).view(1, 1, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(expected))


def test_the_sink_is_neither_scaled_nor_moved_by_positions() -> None:
    attention, x = make("decoder", positions="alibi", sink_init=1.0), torch.randn(1, 5, 32).double()
    torch.nn.init.zeros_(attention.q_proj.weight)
    weights = attention(x, need_weights=True).weights
    distance = torch.arange(5).unsqueeze(-1) - torch.arange(5)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(4, 1, 1)
    parts = torch.exp(-slopes * distance).tril()
    expected = parts / (parts.sum(-1, keepdim=True) + torch.tensor(1.0).exp())
    torch.testing.assert_close(weights[0], expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_large_scores_neither_overflow_nor_vanish(size: float) -> None:
    attention = make().float()
    x = (size * torch.randn(1, 5, 32)).requires_grad_()
    attended = attention(x, need_weights=True)
    (gradient,) = torch.autograd.grad(attended.output.sum(), x)
    assert attended.weights.isfinite().all()
    assert gradient.isfinite().all()
    assert attended.weights.sum(-1).max() == 1
