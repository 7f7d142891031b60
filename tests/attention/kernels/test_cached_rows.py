"""Attention to cached keys, row by row."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtkit.attention.kernels.cached_rows import attend_cached, cached_is_faster, supports_cached

SHAPES = [
    # B, N, H, G, G', L, K, V
    (3, 2, 4, 2, 1, 7, 5, 9),
    (2, 1, 4, 4, 4, 33, 64, 64),
    (2, 3, 6, 3, 6, 1, 16, 8),
    (1, 5, 2, 2, 2, 130, 32, 32),
]


def naive(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(q K^T) V, query by query and head by head, from the visible rows alone."""
    batch, hypotheses, heads, _ = q.shape
    out = torch.zeros(batch, hypotheses, heads, values.shape[4], dtype=torch.float64)
    for b, n, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = visible[b, n, h].nonzero().squeeze(1)
        if len(seen):
            cached = n if keys.shape[1] > 1 else 0
            key = keys[b, cached, h * keys.shape[2] // heads, seen].double()
            value = values[b, cached, h * values.shape[2] // heads, seen].double()
            out[b, n, h] = (key @ q[b, n, h].double() * scale).softmax(0) @ value
    return out


def laid_out(layout: str, x: Tensor) -> Tensor:
    """The same rows (B, N, G, L, K), with room behind them, heads behind positions, or turned."""
    if layout == "room":
        return torch.cat([x, torch.full_like(x, torch.nan)], 3)[:, :, :, : x.shape[3]]
    if layout == "positions first":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "turned":
        return x.transpose(3, 4).contiguous().transpose(3, 4)
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]  # beside others, at no multiple of the width


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["room", "positions first", "turned", "between"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", ["no", "by segment", "by hypothesis", "by head"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_softmax_of_the_visible_rows(shape: tuple[int, ...], masked: str, shared: bool, layout: str) -> None:
    batch, hypotheses, heads, groups, value_groups, length, width, value_width = shape
    caches = 1 if shared else hypotheses
    q = laid_out(layout, torch.randn(batch, hypotheses, heads, 1, width)).squeeze(3) * 3
    keys = laid_out(layout, torch.randn(batch, caches, groups, length, width))
    values = laid_out(layout, torch.randn(batch, caches, value_groups, length, value_width))
    across = {"no": (), "by segment": (batch, 1, 1), "by hypothesis": (batch, hypotheses, 1)}
    visible = torch.rand(*across.get(masked, (batch, hypotheses, heads)), length) < 0.6
    found = attend_cached(q, keys, values, scale=0.4, visible=None if masked == "no" else visible)
    everything = torch.ones(1, dtype=torch.bool)
    expected = naive(q, keys, values, (everything if masked == "no" else visible).expand(*q.shape[:3], length), 0.4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-6)


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 8, 16, 17, 64, 100, 130])
def test_rows_in_bfloat16_are_read_exactly(width: int) -> None:
    """All sums are in float32."""
    q, visible = torch.randn(3, 5, 4, width), torch.rand(3, 5, 1, 11) < 0.7
    keys, values = torch.randn(3, 5, 2, 11, width).bfloat16(), torch.randn(3, 5, 2, 11, 2 * width).bfloat16()
    found = attend_cached(q, keys, values, scale=0.4, visible=visible)
    assert torch.equal(found, attend_cached(q, keys.float(), values.float(), scale=0.4, visible=visible))


@torch.inference_mode()
def test_a_query_that_sees_nothing_gets_zero_and_hidden_rows_may_hold_anything() -> None:
    q, keys, values = torch.randn(2, 2, 2, 8), torch.randn(2, 1, 2, 6, 8), torch.randn(2, 1, 2, 6, 8)
    visible = torch.ones(2, 2, 1, 6, dtype=torch.bool)
    visible[0, 0], visible[:, :, :, 3] = False, False
    expected = attend_cached(q, keys, values, scale=1.0, visible=visible)
    assert (expected[0, 0] == 0).all()
    keys[:, :, :, 3], values[:, :, :, 3] = torch.nan, torch.inf
    assert torch.equal(attend_cached(q, keys, values, scale=1.0, visible=visible), expected)


@torch.inference_mode()
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_visible_row_that_is_no_number_reaches_those_that_see_it(number: float) -> None:
    q, keys, values = torch.ones(1, 2, 1, 8), torch.randn(1, 1, 1, 6, 8), torch.randn(1, 1, 1, 6, 8)
    keys[0, 0, 0, 3] = number
    visible = torch.ones(1, 2, 1, 6, dtype=torch.bool)
    visible[0, 1, 0, 3] = False
    found = attend_cached(q, keys, values, scale=1.0, visible=visible)
    assert found[0, 0].isnan().all()
    assert found[0, 1].isfinite().all()


@torch.inference_mode()
def test_scores_far_apart_pick_one_row() -> None:
    q, keys, values = torch.full((1, 1, 1, 4), 1e4), torch.zeros(1, 1, 1, 5, 4), torch.randn(1, 1, 1, 5, 4)
    keys[0, 0, 0, 2] = 1.0
    torch.testing.assert_close(attend_cached(q, keys, values, scale=1.0)[0, 0, 0], values[0, 0, 0, 2])


def test_what_it_takes() -> None:
    q, keys = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 9, 4)
    assert supports_cached(q, keys, keys)
    assert not supports_cached(q.double(), keys, keys)
    assert supports_cached(q, keys.bfloat16(), keys.bfloat16())
    assert not supports_cached(q, keys.bfloat16(), keys)
    assert not supports_cached(q.bfloat16(), keys.bfloat16(), keys.bfloat16())
    assert not supports_cached(q, keys, keys.clone().requires_grad_())
    assert not supports_cached(q.to("meta"), keys, keys)
    with FlopCounterMode(display=False):  # which sees operations of PyTorch alone
        assert not supports_cached(q, keys, keys)


@pytest.mark.parametrize(
    ("threads", "queries", "hidden", "length", "paid"),
    [
        (1, 1, 1, 1_000, True),
        (1, 1, 1, 10_000, False),
        (1, 5, 1, 10_000, True),
        (4, 5, 1, 2_000, False),
        (4, 5, 5, 2_000, True),
    ],
)
def test_one_core_does_what_is_less_than_its_share(
    threads: int, queries: int, hidden: int, length: int, paid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, keys = torch.empty(1, 5, 4, 8), torch.empty(1, 1, 4, length, 8)
    assert cached_is_faster(q, keys, queries, hidden) == paid


def test_keys_in_bfloat16_pay_beside_products_that_need_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    q, keys = torch.empty(1, 1, 4, 8), torch.empty(1, 1, 4, 100_000, 8)
    assert cached_is_faster(q, keys.bfloat16())
    assert not cached_is_faster(q, keys)


def test_nothing_gives_nothing() -> None:
    keys = torch.randn(2, 1, 2, 3, 4)
    assert attend_cached(torch.empty(2, 0, 2, 4), keys, keys, scale=1.0).shape == (2, 0, 2, 4)
    assert not attend_cached(torch.randn(2, 1, 2, 4), keys[:, :, :, :0], keys[:, :, :, :0], scale=1.0).any()
