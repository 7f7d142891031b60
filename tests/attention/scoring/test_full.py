"""Full attention: the definition that every other mechanism's limit is measured by."""

from typing import Any

import pytest
import torch

from mtkit.attention import build
from mtkit.attention.kernels.dot_product import attend


def make(role: str = "encoder", **arguments: Any) -> Any:
    return build("full", **{"role": role, "d_model": 32, "heads": 4} | arguments).eval()


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_it_is_pytorchs_own_multi_head_attention(role: str) -> None:
    full, x = make(role), torch.randn(2, 7, 32)
    other = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    other.in_proj_weight = torch.nn.Parameter(torch.cat([p.weight for p in (full.q_proj, full.k_proj, full.v_proj)]))
    other.out_proj.weight = full.out_proj.weight
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if role == "decoder" else None
    wanted, weights = other(x, x, x, attn_mask=hidden, average_attn_weights=False)
    attended = full(x, need_weights=True)
    torch.testing.assert_close(attended.output, wanted)
    torch.testing.assert_close(attended.weights, weights)
    torch.testing.assert_close(full(x).output, wanted)


def test_a_memory_of_another_width_is_read() -> None:
    full = make("cross", memory_width=12)
    assert full(torch.randn(2, 3, 32), torch.randn(2, 9, 12)).output.shape == (2, 3, 32)


def test_one_key_is_its_value() -> None:
    full, x = make("decoder"), torch.randn(2, 5, 32)
    torch.testing.assert_close(full(x).output[:, 0], full.out_proj(full.v_proj(x[:, 0])))


def test_weights_are_given_when_asked_for() -> None:
    full, x, memory = make("cross"), torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    assert full(x, memory).weights is None
    weights = full(x, memory, memory_valid=valid, need_weights=True).weights
    assert weights.shape == (2, 4, 3, 5)
    assert not weights[1, :, :, 2:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    state, _ = full.start(2, memory, valid, hypotheses=3)
    torch.testing.assert_close(full.step(x, state, need_weights=True)[0].weights, weights)


def test_dropout_is_of_weights_and_only_in_training() -> None:
    full, x = make(dropout=0.5), torch.randn(2, 7, 32)
    assert torch.equal(full(x).output, full(x).output)
    full.train()
    assert not torch.equal(full(x).output, full(x).output)


def test_fused_and_explicit_attention_agree_in_float64() -> None:
    qkv = [torch.randn(2, 4, 33, 8, dtype=torch.float64) for _ in range(3)]
    for causal in (True, False):
        fused, explicit = (attend(*qkv, scale=0.3, causal=causal, need_weights=need)[0] for need in (False, True))
        torch.testing.assert_close(fused, explicit, rtol=1e-12, atol=1e-12)
