"""Short convolutions: PyTorch's depthwise convolution of either direction, and its continuation."""

import copy

import pytest
import torch
from torch.nn import functional as F

from mtkit.attention.linear._short_convolution import NUMBERS_AT_ONCE, ShortConvolution


@pytest.mark.parametrize("taps", [1, 2, 4, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_depthwise_convolution_over_earlier_or_over_later_inputs(taps: int, bias: bool) -> None:
    convolution, x = ShortConvolution(3, taps, bias=bias).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    kernel = convolution.weight.flip(0).T.unsqueeze(1)  # conv1d does not turn its kernel
    earlier = F.conv1d(F.pad(x.mT, (taps - 1, 0)), kernel, convolution.bias, groups=3).mT
    torch.testing.assert_close(convolution(x), F.silu(earlier))
    later = F.conv1d(F.pad(x.mT, (0, taps - 1)), kernel.flip(2), convolution.bias, groups=3).mT
    torch.testing.assert_close(convolution(x, reverse=True), F.silu(later))
    torch.testing.assert_close(convolution(x, reverse=True), convolution(x.flip(1)).flip(1))
    inputs = torch.cat([x.new_zeros(2, taps - 1, 3), x], dim=1)
    newest, kept = convolution.newest(inputs[:, 4 : 3 + taps], x[:, 4:5])
    torch.testing.assert_close(newest, convolution(x)[:, 4:5])
    torch.testing.assert_close(kept, inputs[:, 5 : 4 + taps])
    torch.testing.assert_close(convolution(x[..., 1:], first=1), convolution(x)[..., 1:])


@torch.inference_mode()
@pytest.mark.parametrize("taps", [1, 2, 4, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_steps_by_the_loop_are_the_convolution(taps: int, bias: bool) -> None:
    convolution, x = ShortConvolution(37, taps, bias=bias), 3 * torch.randn(5, 12, 37)
    expected, earlier, outputs = convolution(x), torch.zeros(5, taps - 1, 37), []
    for t in range(12):
        y, earlier = convolution.newest(earlier, x[:, t : t + 1])
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-6)


def test_a_tap_is_the_weight_of_a_distance() -> None:
    convolution = ShortConvolution(1, 3)
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([[1.0], [10.0], [100.0]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    for reverse, wanted in ((False, [1.0, 12.0, 123.0, 234.0]), (True, [321.0, 432.0, 43.0, 4.0])):
        torch.testing.assert_close(convolution(x, reverse=reverse).flatten(), F.silu(torch.tensor(wanted)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(1, 4), (2, 4), (9, 4), (9, 1), (9, 3)])
@pytest.mark.parametrize("at_once", [1, 18, 1 << 20])
def test_gradients_are_those_of_autograd(
    reverse: bool, length: int, taps: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NUMBERS_AT_ONCE, "cpu", at_once)
    convolution = ShortConvolution(3, taps, bias=True).double()
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, *convolution.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: convolution(x, reverse=reverse), inputs)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("channels", "taps", "length"), [(3, 4, 2), (70, 4, 600), (130, 1, 9)])
def test_the_compiled_gradients_in_float32_are_those_in_float64(
    reverse: bool, channels: int, taps: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # 70 channels are too few for a second thread's range
    exact = ShortConvolution(channels, taps, bias=True).double()
    x = torch.randn(2, length, channels + 2, dtype=torch.float64).mul_(4)
    x[0, 0, :2] = torch.tensor([-200.0, 200.0])  # sigmoids of 0 and 1
    d_y = torch.randn(2, channels, length, dtype=torch.float64).mT
    gradients = []
    for dtype in (torch.float64, torch.float32):
        inputs = x.to(dtype)[..., :channels].requires_grad_()
        layer = copy.deepcopy(exact).to(dtype)
        layer(inputs, reverse=reverse).backward(d_y.to(dtype))
        gradients.append([inputs.grad, layer.weight.grad, layer.bias.grad])
    for wanted, found in zip(*gradients, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
