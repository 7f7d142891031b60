"""Dot-product attention over sequences and for steps."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.kernels import dot_product
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax
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
