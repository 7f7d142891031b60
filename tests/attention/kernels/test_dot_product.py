"""Dot-product attention over sequences and for steps, and over cached keys."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtkit.attention.contract import Site
from mtkit.attention.kernels import dot_product
from mtkit.attention.kernels.dot_product import (
    attend,
    attend_cached,
    attend_step,
    cached_is_faster,
    safe_softmax,
    supports_cached,
)
from mtkit.attention.positions import Alibi, Shaw

SCALE = 0.4
MASKS = ["none", "causal", "valid"]
VALID = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])


def inputs(groups: int = 4, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q (2, 4, 7, 6), k and v (2, G, 7, 6)."""
    shapes = (2, 4, 7, 6), (2, groups, 7, 6), (2, groups, 7, 6)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def equation(q: Tensor, k: Tensor, v: Tensor, masks: str, bias: Tensor | float = 0.0) -> Tensor:
    """Softmax attention, head a reading the keys of group a // (H / G)."""
    group = [a // (4 // k.shape[1]) for a in range(4)]
    scores = torch.einsum("bhtk,bhsk->bhts", q, k[:, group]) * SCALE + bias
    if masks == "causal":
        scores = scores + torch.full((7, 7), float("-inf")).triu(1)
    if masks == "valid":
        scores = scores.masked_fill(~VALID[:, None, None, :], float("-inf"))
    return torch.einsum("bhts,bhsv->bhtv", scores.softmax(-1), v[:, group])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_each_path_is_the_equation(groups: int, masks: str, need_weights: bool) -> None:
    qkv = inputs(groups)
    valid = VALID if masks == "valid" else None
    got, weights = attend(*qkv, scale=SCALE, causal=masks == "causal", valid=valid, need_weights=need_weights)
    wanted = equation(*qkv, masks)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(got)
    gradients = [torch.autograd.grad(output, qkv, direction) for output in (got, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert (weights is not None) == need_weights
    if weights is not None:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masks", MASKS)
def test_in_inference_one_thread_computes_the_equation_over_few_keys(
    groups: int, masks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with torch.inference_mode():
        qkv = [x.detach() for x in inputs(groups, dtype=torch.float32)]
        valid = VALID if masks == "valid" else None
        got, _ = attend(*qkv, scale=SCALE, causal=masks == "causal", valid=valid)
        torch.testing.assert_close(got, equation(*qkv, masks))


@pytest.mark.parametrize("masks", MASKS)
def test_a_bias_enters_the_fused_path_as_it_enters_the_equation(masks: str) -> None:
    qkv = inputs()
    alibi = Alibi(Site("encoder", 24, 4), 6)
    valid = VALID if masks == "valid" else None
    got, _ = attend(*qkv, scale=SCALE, causal=masks == "causal", valid=valid, positions=alibi)
    place = torch.arange(7)
    bias = -torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).view(4, 1, 1) * (place[:, None] - place).abs()
    torch.testing.assert_close(got, equation(*qkv, masks, bias), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_segment_without_keys_gives_zero_and_finite_gradients(need_weights: bool) -> None:
    qkv = inputs(dtype=torch.float32)
    valid = torch.tensor([[True] * 7, [False] * 7])
    output, _ = attend(*qkv, scale=SCALE, valid=valid, need_weights=need_weights)
    assert output[0].any()
    assert not output[1].any()
    assert all(each.isfinite().all() for each in torch.autograd.grad(output.sum(), qkv))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_padding_that_a_gpu_reads_is_the_same_attention(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, valid = inputs(dtype=dtype), torch.cat([VALID[1:], torch.zeros(1, 7, dtype=torch.bool)])
    wanted, _ = attend(*qkv, scale=SCALE, valid=valid)
    monkeypatch.setattr(dot_product, "hides_all_keys", lambda q: True)  # true of the CPU's kernel too
    got, _ = attend(*qkv, scale=SCALE, valid=valid)
    assert wanted[0].any()
    torch.testing.assert_close(got, wanted)
    upstream = torch.randn_like(got)
    gradients = [torch.autograd.grad(output, qkv, upstream) for output in (got, wanted)]
    torch.testing.assert_close(*gradients)


def test_no_logit_is_large_enough_to_overcome_the_mask() -> None:
    scores = torch.tensor([[1e30, -1e30, 3.0], [1e30, 1e30, 1e30]])
    visible = torch.tensor([[False, True, False], [False, False, False]])
    assert safe_softmax(scores, visible).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_dropout_acts_on_the_weights_that_are_used_not_on_those_returned() -> None:
    qkv = inputs()
    output, weights = attend(*qkv, scale=SCALE, dropout=0.5, need_weights=True)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
    assert not torch.allclose(output, equation(*qkv, "none"))


@pytest.mark.parametrize("masks", ["none", "valid"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_short_sequence_in_inference_mode_is_the_equation_too(
    groups: int, masks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read row by row (`attend_cached`)."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k, v = (each.detach() for each in inputs(groups, dtype=torch.float32))
    with torch.inference_mode():
        got, weights = attend(q, k, v, scale=SCALE, valid=VALID if masks == "valid" else None)
    assert weights is None
    wanted = equation(q.double(), k.double(), v.double(), masks)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["with gradients", "without", "with weights"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("positions", [None, Alibi(Site("decoder", 24, 4), 6), Shaw(Site("decoder", 24, 4), 6, clip=2)])
def test_a_step_of_each_hypothesis_is_the_last_row_of_the_triangle(
    groups: int, positions: Alibi | Shaw | None, how: str
) -> None:
    for parameter in positions.parameters() if positions is not None else ():
        torch.nn.init.normal_(parameter)
    q, k, v = inputs(groups, dtype=torch.float32)  # the batch of 2 as hypotheses of one segment
    whole, weights = attend(q, k, v, scale=SCALE, causal=True, positions=positions, need_weights=True)
    if how == "without":
        q, k, v = q.detach(), k.detach(), v.detach()
    got, row = attend_step(
        q[:, :, 6].unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        scale=SCALE,
        positions=positions,
        query_position=6,
        need_weights=how == "with weights",
    )
    torch.testing.assert_close(got[0], whole[:, :, 6])
    assert weights is not None
    if how == "with weights":
        assert row is not None
        torch.testing.assert_close(row[0], weights[:, :, 6].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("hypotheses", [1, 7])
def test_hypotheses_share_keys_as_queries_of_one_segment(
    hypotheses: int, need_weights: bool, dtype: torch.dtype
) -> None:
    q, k, v = (each.detach() for each in inputs(2, dtype=dtype))
    q = q[:, :, :hypotheses]
    whole, weights = attend(q, k, v, scale=SCALE, valid=VALID, need_weights=True)
    visible = VALID[:, None, None, :]
    got, rows = attend_step(q.transpose(1, 2), k, v, scale=SCALE, visible=visible, need_weights=need_weights)
    torch.testing.assert_close(got.transpose(1, 2), whole)
    if need_weights:
        torch.testing.assert_close(rows, weights)


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
