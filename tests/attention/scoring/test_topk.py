"""Top-k attention: limits, ties, and what is ranked."""

import pytest
import torch

from tests.attention.small import ROLES, VALID, inputs, maker

make = maker("topk", double=True)


@pytest.mark.parametrize("role", ROLES)
def test_with_as_many_keys_as_there_are_it_is_full_attention(role: str) -> None:
    full, (x, memory, masks) = make(role, "full"), inputs(role)
    for keys, same in ((7, True), (100, True), (2, False)):
        attention = make(role, keys=keys)
        attention.adopt(full.state_dict())
        assert torch.allclose(attention(x, memory, **masks).output, full(x, memory, **masks).output) == same


@pytest.mark.parametrize("role", ROLES)
def test_with_one_key_it_is_the_value_of_the_best_visible_key(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, keys=1), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    best = full(x, memory, **masks, need_weights=True).weights.argmax(-1, keepdim=True)  # (B, H, T, 1)
    weights = attention(x, memory, **masks, need_weights=True).weights
    torch.testing.assert_close(weights, torch.zeros(2, 4, 7, 7).double().scatter(-1, best, 1.0))


@pytest.mark.parametrize("role", ROLES)
def test_the_best_keys_keep_the_proportions_of_full_attention(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, keys=3), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    whole = full(x, memory, **masks, need_weights=True).weights
    kept = whole.where(whole >= whole.sort(-1, descending=True).values[..., 2:3], 0.0)
    expected = kept / kept.sum(-1, keepdim=True)
    weights = attention(x, memory, **masks, need_weights=True).weights
    torch.testing.assert_close(weights, expected)
    counts = torch.arange(1, 8).clamp(max=3) if role == "decoder" else torch.full((7,), 3)
    assert torch.equal((weights > 0).sum(-1), counts.expand(2, 4, 7))


@pytest.mark.parametrize("role", ROLES)
def test_keys_that_tie_are_all_seen(role: str) -> None:
    attention, (x, memory, masks) = make(role, keys=2), inputs(role)
    torch.nn.init.zeros_(attention.k_proj.weight)
    seen = torch.ones(7, 7).tril().expand(2, 1, 7, 7) if role == "decoder" else VALID[:, None, None].expand(2, 1, 7, 7)
    weights = attention(x, memory, **masks, need_weights=True).weights
    torch.testing.assert_close(weights, (seen / seen.sum(-1, keepdim=True)).expand(2, 4, 7, 7).double())


def test_positions_count_in_the_choice() -> None:
    attention, x = make("decoder", keys=2, positions="alibi"), torch.randn(1, 6, 32).double()
    torch.nn.init.zeros_(attention.q_proj.weight)
    seen = attention(x, need_weights=True).weights[0] > 0
    expected = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)  # the nearest two
    assert torch.equal(seen, expected.expand(4, 6, 6))


def test_gradients_reach_the_scores_of_seen_keys_only() -> None:
    attention, x = make(keys=2), torch.randn(1, 6, 32).double()
    pairs = attention.pairs(x)
    logits = torch.randn(1, 4, 6, 6).double().requires_grad_()
    weights = attention.softmax(logits, pairs)
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), logits)
    assert torch.equal(gradient != 0, weights > 0)


def test_choices_are_made_in_float32_under_autocast() -> None:
    """bfloat16 has ties among hundreds of keys."""
    attention, x = make(keys=4).float(), torch.randn(1, 300, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention(x, need_weights=True).weights
    assert torch.equal((weights > 0).sum(-1), torch.full((1, 4, 300), 4))
