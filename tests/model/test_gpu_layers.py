"""The kernels of a GPU, run by Triton's interpreter on the CPU, against the equations in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.model import gpu_layers, sublayers
from mtkit.model.build import build_model
from mtkit.model.gpu_layers import add_and_norm, cross_entropy, feed_forward_and_norm, trains_fused
from mtkit.recipe import make_recipe
from mtkit.training import loss

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


@pytest.fixture
def kernels(interpreted: Callable[[str], None]) -> None:
    interpreted("mtkit.model.gpu_kernels")
    interpreted("mtkit.attention.kernels.gpu.short_kernels")


def mixed(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def kept(seed: int, shape: torch.Size, share: float) -> Tensor:
    """The mask of dropout: 24 bits of each place, mixed with the halves of the seed."""
    place = torch.arange(shape.numel()).view(shape) + (seed & 0xFFFFFFFF)
    return mixed(mixed(place & 0xFFFFFFFF) ^ (seed >> 32)) >> 8 >= round(share * 2**24)


def close(one: Tensor, other: Tensor, dtype: torch.dtype, slack: float = 1.0) -> bool:
    return bool((one.double() - other).norm() <= slack * TOLERANCE[dtype] * other.norm())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("share", [0.0, 1e-9, 0.3])
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (7, 48), (1030, 16), (2, 1025)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sum_and_norm_are_the_equation(
    dtype: torch.dtype, rows: int, width: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_layers, "PROGRAMS", 3)
    norm = nn.LayerNorm(width).to(dtype)
    inputs = [*(torch.randn(2, rows, width).to(dtype).requires_grad_() for _ in range(2)), *norm.parameters()]
    for each in norm.parameters():
        nn.init.normal_(each)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    torch.manual_seed(5)
    mask = kept(int(torch.randint(2**62, (1,))), inputs[0].shape, share)
    wanted = F.layer_norm(wide[0] + wide[1] * mask / (1 - share), (width,), *wide[2:])
    torch.manual_seed(5)
    assert_same(add_and_norm(*inputs[:2], norm, share), inputs, wanted, wide)


def assert_same(got: Tensor, inputs: list[Tensor], wanted: Tensor, wide: list[Tensor], slack: float = 1.0) -> None:
    """Value and gradients differ by rounding alone."""
    dtype, upstream = inputs[0].dtype, torch.randn_like(got)
    assert got.dtype == dtype
    assert close(got, wanted, dtype)
    gradients = [torch.autograd.grad(y, of, upstream.type_as(y)) for y, of in ((got, inputs), (wanted, wide))]
    assert all(close(one, other, dtype, slack) for one, other in zip(*gradients, strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 24, 512), (40, 48, 300), (9, 16, 20)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_feed_forward_layer_is_the_equation(
    dtype: torch.dtype, rows: int, width: int, inner: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_layers, "PROGRAMS", 4)
    norm, first, second = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
    inputs = [torch.randn(2, rows, width).to(dtype).requires_grad_()]
    for module in (norm, first, second):
        inputs += module.to(dtype).parameters()
        nn.init.normal_(module.bias)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    torch.manual_seed(5)
    mask = kept(int(torch.randint(2**62, (1,))), inputs[0].shape, share)
    rounded = F.relu(F.linear(inputs[0], *inputs[3:5])) > 0  # near zero, rounding decides
    hidden = F.linear(wide[0], *wide[3:5]) * rounded
    wanted = F.layer_norm(wide[0] + F.linear(hidden, *wide[5:]) * mask / (1 - share), (width,), *wide[1:3])
    torch.manual_seed(5)
    got = feed_forward_and_norm(inputs[0], first, second, norm, share)
    assert_same(got, inputs, wanted, wide, slack=2.0)


@pytest.mark.usefixtures("kernels")
def test_masks_have_the_share_of_zeros_and_differ_between_calls() -> None:
    norm, x = nn.LayerNorm(64), torch.zeros(500, 64)
    masks = []
    for _ in range(2):
        branch = torch.randn(500, 64, requires_grad=True)
        gradient = torch.autograd.grad(add_and_norm(x, branch, norm, 0.2).square().sum() * 0.5 + branch.sum(), branch)
        masks.append(gradient[0] != 1.0)
    one, other = (mask.float().mean() for mask in masks)
    assert abs(one - 0.8) < 0.01
    assert abs(other - 0.8) < 0.01
    assert abs((masks[0] & masks[1]).float().mean() - 0.64) < 0.015


@pytest.mark.usefixtures("kernels")
def test_a_model_has_the_same_output_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_model": 32, "feed_forward": 48, "heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    recipe = make_recipe({"model": {**small, "norm": "post", "dropout": 0.0, "activation": "relu"}})
    model = build_model(recipe, source_vocabulary=50, target_vocabulary=50, tasks=1).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    pieces, results = torch.randint(4, 50, (3, 5)), []
    for fused in (False, True):
        monkeypatch.setattr(sublayers, "trains_fused", lambda *_, fused=fused: fused)
        hidden = model(pieces, pieces).hidden
        assert ("FeedForwardAndNorm" in str(hidden.grad_fn.next_functions)) == fused
        (hidden * torch.arange(32)).sum().backward()
        results.append([hidden, *(each.grad for each in model.parameters())])
        model.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pieces", [16, 2048, 3001])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_loss_is_the_equation(
    dtype: torch.dtype, pieces: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "runs_kernels", lambda x, *_: x.device.type == "cpu")
    monkeypatch.setattr(torch.version, "cuda", None)  # whose product adds in float32
    hidden, weight = (torch.randn(rows, 24).mul(0.5).to(dtype).requires_grad_() for rows in (21, pieces))
    target = torch.randint(pieces, (21,))
    target[:2] = torch.tensor([0, pieces - 1])
    got = loss.token_loss(hidden, weight, target, smoothing=smoothing, chunk_rows=8)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    wanted = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
    assert close(got.objective, wanted, dtype)
    assert close(got.nll, F.cross_entropy(logits, target, reduction="none"), dtype)
    gradients = [torch.autograd.grad(y * 0.3, of) for y, of in ((got.objective, (hidden, weight)), (wanted, wide))]
    assert all(close(one, other, dtype) for one, other in zip(*gradients, strict=True))


@pytest.mark.usefixtures("kernels")
def test_a_logit_that_is_no_number_makes_the_loss_none() -> None:
    logits, losses = torch.randn(3, 40), torch.empty(2, 3)
    logits[1, 7], logits[2] = torch.nan, torch.linspace(-1e4, 1e4, 40)
    wanted = F.cross_entropy(logits, torch.tensor([5, 5, 5]), reduction="none")
    cross_entropy(logits, torch.tensor([5, 5, 5]), 0.1, losses[0], losses[1])
    torch.testing.assert_close(losses[1], wanted, equal_nan=True)
    assert losses[0].isfinite().tolist() == [True, False, True]


def test_a_cpu_has_no_such_kernels() -> None:
    assert not trains_fused(torch.zeros(2, 8))
