"""The fused kernel where bfloat16 is trained on the CPU: in float32, and the same attention and gradients."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import fused
from mtkit.attention.kernels.fused import fused_attention, padding_bias

SCALE = 0.4


@pytest.fixture(autouse=True)
def _kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SHORT", 0)  # test_fused_short.py has the products that take its place over few keys


def equation(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) * SCALE + bias
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bias"])
def test_attention_in_bfloat16_is_the_equation_of_its_rounded_inputs(mask: str) -> None:
    low = [torch.randn(2, 3, 9, 8).bfloat16().requires_grad_() for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in low]
    visible, bias = torch.ones(9, 9, dtype=torch.bool), 0.0
    given: dict[str, object] = {}
    if mask == "causal":
        visible, given = visible.tril(), {"is_causal": True}
    elif mask == "padding":
        visible = torch.arange(9) < torch.tensor([9, 4]).view(2, 1, 1, 1)
        given = {"mask": visible}
    elif mask == "bias":
        bias = torch.randn(3, 9, 9).bfloat16()
        given = {"mask": bias}
    got, wanted = fused_attention(*low, scale=SCALE, **given), equation(*wide, visible, bias)
    assert got.dtype == torch.bfloat16
    # only what comes out is rounded, to 8 bits
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-5)
    upstream = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad(got, low, upstream), torch.autograd.grad(wanted, wide, upstream.double()), strict=True
    ):
        assert ((one.double() - other).norm() / other.norm()).item() < 0.006


@pytest.mark.parametrize(
    ("dtype", "keys", "widens"),
    [(torch.bfloat16, 12, True), (torch.bfloat16, 13, False), (torch.float32, 12, False)],
)
def test_float32_is_for_bfloat16_over_few_keys(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keys: int, widens: bool
) -> None:
    monkeypatch.setattr(fused, "MOST_KEYS", 12)
    q, k, v = (torch.randn(1, 2, length, 8, dtype=dtype) for length in (5, keys, keys))
    seen = []
    kernel = fused.F.scaled_dot_product_attention
    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", lambda *x, **how: seen.append(x) or kernel(*x, **how))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = fused_attention(q, k, v, scale=SCALE)
    assert output.dtype == dtype
    assert [x.dtype for x in seen[0]] == [torch.float32 if widens else dtype] * 3


def test_dropped_weights_are_scaled_up() -> None:
    torch.manual_seed(1)
    q, k = (torch.randn(1, 1, n, 4).bfloat16().requires_grad_() for n in (2000, 8))
    v = torch.eye(8).bfloat16()[None, None]  # the outputs are the weights
    weights = fused_attention(q, k, v, scale=SCALE, dropout=0.25)
    whole = fused_attention(q.detach(), k.detach(), v, scale=SCALE)
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(weights[weights != 0], whole[weights != 0] / 0.75, rtol=0.03, atol=0.01)


def test_layers_share_what_hides_padding_until_the_padding_changes() -> None:
    valid = torch.tensor([[True, True, False], [False, False, False]])
    bias = padding_bias(valid, torch.bfloat16)
    hidden = -torch.inf
    assert bias.tolist() == [[[[0.0, 0.0, hidden]]], [[[hidden] * 3]]]
    assert bias.stride() == (16, 16, 16, 1)  # the kernel copies a mask whose strides are no multiples of 16
    assert padding_bias(valid, torch.bfloat16) is bias
    assert padding_bias(valid, torch.float32).dtype == torch.float32
    assert padding_bias(valid[:], torch.float32) is not padding_bias(valid, torch.float32)
    before = padding_bias(valid, torch.bfloat16)
    valid[1] = True
    assert before[1].isinf().all()
    assert not padding_bias(valid, torch.bfloat16)[1].any()


def test_padding_of_inference_mode_is_made_anew_and_serves_training_too() -> None:
    with torch.inference_mode():
        valid = torch.tensor([[True, False]])
        padding_bias(valid, torch.float32)
        valid[:] = True
        assert not padding_bias(valid, torch.float32).any()
    outside = torch.tensor([[True, False]])
    with torch.inference_mode():
        padding_bias(outside, torch.float32)
    assert not padding_bias(outside, torch.float32).is_inference()
