from contextlib import suppress
from itertools import product as combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.cpu import training_products
from mtkit.attention.kernels.cpu.training_products import float32_products, linear, product
from mtkit.training.flops import flop_counter, without_onednn

TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}
"""Of float32 sums of up to 300 products of standard normal numbers, in another order."""


@pytest.fixture(params=[False, True], ids=["PyTorch", "oneDNN"])
def by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    chosen: bool = request.param and torch.backends.mkldnn.is_available()
    monkeypatch.setattr(training_products, "packs_float32", lambda: chosen)
    return chosen


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other places of memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "sliced":
        return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
    return x


LAYOUTS = ("contiguous", "transposed", "sliced")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lead", [(1,), (7,), (64,), (0,), (2, 0), (3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 17), (64, 32), (17, 300)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_is_pytorch_s_with_its_gradients(
    by_onednn: bool, layout: str, lead: tuple[int, ...], inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(1)
    x = laid_out(torch.randn(*lead, inputs), layout).requires_grad_()
    weight = laid_out(torch.randn(outputs, inputs), layout).requires_grad_()
    factors = [x, weight, *([torch.randn(outputs, requires_grad=True)] if has_bias else [])]
    output, expected = linear(*factors), F.linear(*factors)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    for upstream in (laid_out(torch.randn_like(expected), layout), torch.ones(()).expand_as(expected)):
        gradients, theirs = (torch.autograd.grad(y, factors, upstream, retain_graph=True) for y in (output, expected))
        for gradient, other in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(gradient, other, **TOLERANCE)


@pytest.mark.parametrize("needed", [*combinations([True, False], repeat=3)][:-1], ids=str)
def test_only_the_gradients_that_are_needed_are_computed(by_onednn: bool, needed: tuple[bool, bool, bool]) -> None:
    shapes = ((5, 8), (4, 8), (4,))
    factors = [torch.randn(shape, requires_grad=each) for shape, each in zip(shapes, needed, strict=True)]
    linear(*factors).sum().backward()
    assert tuple(factor.grad is not None for factor in factors) == needed


@pytest.mark.parametrize("layouts", [*combinations(LAYOUTS, repeat=2)], ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (5, 300, 16), (64, 16, 300), (0, 4, 3), (3, 0, 4)])
def test_a_product_is_pytorch_s(by_onednn: bool, layouts: tuple[str, str], rows: int, inner: int, columns: int) -> None:
    left, right = laid_out(torch.randn(rows, inner), layouts[0]), laid_out(torch.randn(inner, columns), layouts[1])
    torch.testing.assert_close(product(left, right), left @ right, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_alone(by_onednn: bool, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(6, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype), torch.randn(5, dtype=dtype)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(product(x, weight.t()), x @ weight.t())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight.float()).dtype == torch.bfloat16


def test_nothing_is_computed_by_a_library_that_is_disabled(by_onednn: bool) -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8)
    with without_onednn(), flop_counter() as counter:
        output = linear(x, weight)
        product(output.detach(), weight)
    assert counter.get_total_flops() == 2 * 2 * 6 * 8 * 5
    assert torch.equal(output, F.linear(x, weight))


def test_layers_of_a_model_compute_by_it_only_inside(by_onednn: bool) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), Doubled(6, 4)), torch.randn(3, 5, 8)
    expected = model(x)
    with suppress(KeyError), float32_products(model):
        output = model(x)
        replaced = ["forward" in layer.__dict__ for layer in model]
        raise KeyError
    assert replaced == [by_onednn, False, False]
    assert not any("forward" in layer.__dict__ for layer in model)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    parameters = [*model.parameters()]
    pairs = (torch.autograd.grad(y.square().sum(), parameters) for y in (output, expected))
    for gradient, other in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, other, **TOLERANCE)


def test_layers_on_other_devices_are_left_alone(by_onednn: bool) -> None:
    layer = nn.Linear(8, 6, device="meta")
    with float32_products(layer):
        assert "forward" not in layer.__dict__
