"""Differential attention: its limits, lambda, the norm of a pair, dropout, and the two ways to compute it."""

import math
from typing import Any

import pytest
import torch

from mtkit.attention.scoring.differential import VECTORS
from mtkit.errors import MtkitError
from tests.attention.small import ROLES, inputs, maker
from tests.contract.counting import count

make = maker("differential", "decoder", double=True)


def fix_lambda(attention: Any) -> None:
    """Makes lambda exactly lambda_init."""
    for one, other in (("lambda_q1", "lambda_q2"), ("lambda_k1", "lambda_k2")):
        getattr(attention, other).data.copy_(getattr(attention, one))


def pair_slices(attention: Any) -> None:
    """Gives heads 2n and 2n + 1 the same queries and keys."""
    for name in ("q_proj", "k_proj"):
        for tensor in getattr(attention, name).parameters():
            rows = tensor.data.unflatten(0, (2, 2, 8))
            rows[:, 1] = rows[:, 0]


@pytest.mark.parametrize("role", ROLES)
def test_with_equal_maps_and_lambda_0_it_is_full_attention(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, norm="none", lambda_init=0.0), make(role, "full"), inputs(role)
    pair_slices(full)
    attention.adopt(full.state_dict())
    fix_lambda(attention)
    torch.testing.assert_close(attention(x, memory, **masks).output, full(x, memory, **masks).output)


@pytest.mark.parametrize("role", ROLES)
def test_with_lambda_0_both_heads_of_a_pair_use_its_first_map(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, norm="none", lambda_init=0.0), make(role, "full"), inputs(role)
    attention.adopt(full.state_dict())
    fix_lambda(attention)
    assert not torch.allclose(attention(x, memory, **masks).output, full(x, memory, **masks).output)
    pair_slices(full)
    torch.testing.assert_close(attention(x, memory, **masks).output, full(x, memory, **masks).output)


def test_equal_maps_leave_1_minus_lambda_of_full_attention() -> None:
    attention, full, (x, _, masks) = make(norm="none", lambda_init=0.3), make(name="full"), inputs("decoder")
    pair_slices(full)
    attention.adopt(full.state_dict())
    fix_lambda(attention)
    expected = full(x, **masks).output - full.out_proj.bias
    torch.testing.assert_close(attention(x, **masks).output - full.out_proj.bias, 0.7 * 0.7 * expected)


def test_lambda_is_the_equation_and_starts_by_layer() -> None:
    for layer, start in ((0, 0.2), (1, 0.8 - 0.6 * math.exp(-0.3)), (5, 0.8 - 0.6 * math.exp(-1.5))):
        attention = make(layer=layer, layers=6)
        assert attention.lambda_init == pytest.approx(start)
        q1, k1, q2, k2 = (getattr(attention, name) for name in VECTORS)
        wanted = math.exp((q1 @ k1).item()) - math.exp((q2 @ k2).item()) + start
        assert attention.subtracted.item() == pytest.approx(wanted)
        fix_lambda(attention)
        assert attention.subtracted.item() == pytest.approx(start, abs=1e-12)


def test_the_norm_is_over_both_halves_of_a_pair_and_its_factor_is_1_minus_lambda_init() -> None:
    attention, (x, _, masks) = make(lambda_init=0.25), inputs("decoder")
    heads, _, _ = attention.attended(attention.pairs(x, **masks), None, False)
    pairs = heads.unflatten(1, (2, 2)).transpose(2, 3).flatten(3)  # (B, H / 2, T, 2 V)
    torch.testing.assert_close(
        pairs.square().mean(-1).sqrt(), torch.full((2, 2, 7), 0.75).double(), rtol=1e-2, atol=1e-2
    )
    halves = heads.square().mean(-1).sqrt()
    assert (halves - 0.75).abs().max() > 0.1


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("positions", [None, "alibi", "shaw"])
def test_the_fused_kernel_and_weights_give_the_same(role: str, positions: str | None) -> None:
    if role == "cross" and positions:
        return
    attention, (x, memory, masks) = make(role, positions=positions), inputs(role)
    expected = attention(x, memory, **masks, need_weights=True)
    torch.testing.assert_close(attention(x, memory, **masks).output, expected.output)
    assert expected.weights.shape == (2, 4, 7, 7)
    torch.testing.assert_close(expected.weights.sum(-1), torch.ones(2, 4, 7).double())


def test_without_weights_no_map_is_held() -> None:
    attention, x = make().float(), torch.randn(1, 256, 32)
    counted, _ = count(lambda: attention(x).output.sum().backward())
    assert counted.largest < 256 * 256


def test_dropout_acts_on_each_map() -> None:
    """The mean over many draws is the output without dropout, if nothing is normalised."""
    attention, x = make("encoder", dropout=0.3, norm="none"), torch.randn(1, 5, 32).double()
    expected, attention = attention(x).output, attention.train()
    for need_weights in (False, True):
        drawn = attention(x.expand(20000, -1, -1), need_weights=need_weights).output
        assert drawn.std(0).min() > 1e-3
        torch.testing.assert_close(drawn.mean(0, keepdim=True), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("positions", [None, "rotary", "alibi"])
def test_all_channels_of_a_pair_have_the_same_dropout(positions: str | None) -> None:
    attention, (x, _, masks) = make(dropout=0.5, norm="none", positions=positions).train(), inputs("decoder")
    with torch.no_grad():
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.fill_(1.0)
        attention.out_proj.weight.copy_(torch.eye(32))
        attention.out_proj.bias.zero_()
    for need_weights in (False, True):
        pairs = attention(x, **masks, need_weights=need_weights).output.unflatten(-1, (2, 16))
        torch.testing.assert_close(pairs, pairs[..., :1].expand_as(pairs))
        assert pairs.std() > 0.1


def test_an_odd_number_of_heads_is_refused() -> None:
    with pytest.raises(MtkitError, match="heads = 3 must be even"):
        make(d_model=33, heads=3)
