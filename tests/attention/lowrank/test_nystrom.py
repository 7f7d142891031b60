"""Nyströmformer: the rate of its iteration, the limits where it is exact, and its convolution."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.lowrank import nystrom as module
from mtkit.attention.lowrank.nystrom import pseudo_inverse
from mtkit.errors import MtkitError
from tests.attention.small import maker

make = maker("nystrom", seed=5)


def left_over(kernel: Tensor, iterations: int) -> Tensor:
    """The norm of I - M Z that exact arithmetic has, from the singular values of M: of e stays e^3 (3 + e) / 4."""
    singular = torch.linalg.svdvals(kernel.double())
    e = 1 - singular**2 / kernel.double().sum(-2).amax(-1, keepdim=True)
    for _ in range(iterations):
        e = e**3 * (3 + e) / 4
    return e.norm(dim=-1)


def residual(kernel: Tensor, z: Tensor) -> Tensor:
    eye = torch.eye(kernel.shape[-1], dtype=torch.double)
    return torch.linalg.matrix_norm(eye - kernel.double() @ z.double())


def kernels() -> dict[str, Tensor]:
    """Softmaxes between 64 landmarks that differ, that nearly agree, of which half are repeated, that are all alike."""
    draw = torch.Generator().manual_seed(0)
    some = torch.randn(64, 64, generator=draw)
    scores = {"apart": some, "near": 1e-4 * some, "repeated": some[:2].repeat(32, 1), "alike": torch.zeros(64, 64)}
    return {name: each.softmax(-1) for name, each in scores.items()}


@pytest.mark.parametrize("iterations", [1, 6, 12, 20])
@pytest.mark.parametrize("name", ["apart", "near", "repeated", "alike"])
def test_the_iteration_leaves_what_its_rate_says_in_float32(name: str, iterations: int) -> None:
    kernel = kernels()[name]
    z = pseudo_inverse(kernel, iterations)
    assert z.isfinite().all()
    assert (residual(kernel, z) - left_over(kernel, iterations)).abs() < 0.01
    if iterations > 1:
        # what has not converged hardly meets a vector of ones, which M maps to itself
        sums = kernel @ (z @ torch.ones(64, 1))
        assert (sums - 1).abs().max() < 5e-3


def test_six_iterations_are_not_enough_and_sixteen_are() -> None:
    kernel = kernels()["apart"].double()
    assert residual(kernel, pseudo_inverse(kernel, 6)) > 0.5
    assert residual(kernel, pseudo_inverse(kernel, 16)) < 1e-10
    torch.testing.assert_close(pseudo_inverse(kernel, 16), torch.linalg.inv(kernel), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4, 0.0])
def test_tokens_that_are_nearly_alike_keep_the_rate_under_autocast(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near-singular landmarks, in bfloat16: the iteration itself is in float32."""
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(kernel: Tensor, iterations: int) -> Tensor:
        seen.append((kernel, pseudo_inverse(kernel, iterations)))
        return seen[-1][1]

    monkeypatch.setattr(module, "pseudo_inverse", watched)
    ours = make(landmarks=16)
    x = torch.randn(1, 1, 32) + spread * torch.randn(2, 90, 32)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(x).output
    output.float().square().sum().backward()
    ((kernel, z),) = seen
    assert kernel.dtype == z.dtype == torch.float32
    assert (residual(kernel, z) - left_over(kernel, 6)).abs().max() < 1e-3
    assert output.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.isfinite().all()
    exact = ours.double()(x.double()).output
    assert (output - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("iterations", [6, 20])
@torch.no_grad()
def test_equal_tokens_give_what_full_gives(iterations: int) -> None:
    """The exactly singular case: all landmarks alike, every weight 1 / T."""
    full, ours = make(name="full"), make(landmarks=16, pinv_iters=iterations, conv_kernel=0)
    ours.adopt(full.state_dict())
    x = torch.randn(2, 1, 32).expand(2, 50, 32)
    torch.testing.assert_close(ours(x).output, full(x).output, atol=1e-5, rtol=0)


@torch.no_grad()
def test_landmarks_that_are_the_tokens_give_full_attention() -> None:
    """Each of m tokens comes r times, so that the means are the tokens and A Z A = A where Z has converged."""
    full, ours = make(name="full").double(), make(landmarks=6, pinv_iters=20, conv_kernel=0).double()
    for each in (full.q_proj, full.k_proj):
        each.weight *= 2
    ours.adopt(full.state_dict())
    x = torch.randn(2, 6, 32, dtype=torch.double).repeat_interleave(3, 1)
    torch.testing.assert_close(ours(x).output, full(x).output, atol=1e-5, rtol=0)
    ours.iterations = 1
    assert (ours(x).output - full(x).output).abs().max() > 1e-2


@torch.no_grad()
def test_rows_of_the_map_sum_to_one_where_the_iteration_has_converged() -> None:
    ours = make(landmarks=6, pinv_iters=20, conv_kernel=0).double()
    ours.v_proj.weight.zero_()
    ours.v_proj.bias.fill_(1.0)
    ours.out_proj.weight.copy_(torch.eye(32))
    output = ours(torch.randn(2, 40, 32, dtype=torch.double)).output
    torch.testing.assert_close(output, torch.ones_like(output), atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_scale_of_a_segment_and_head_is_its_own() -> None:
    """A segment whose landmarks all read one token, of which columns sum to m, changes nothing beside it."""
    ours = make(landmarks=8)
    x = torch.randn(2, 40, 32)
    x[1] *= 40
    torch.testing.assert_close(ours(x).output[:1], ours(x[:1]).output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 9, 30])
@torch.no_grad()
def test_the_convolution_adds_values_nearby(length: int) -> None:
    """A kernel for each head over time, the same for all channels, with zeros around the real tokens."""
    ours, plain = make(conv_kernel=5, landmarks=8), make(conv_kernel=0, landmarks=8)
    plain.adopt(ours.state_dict())
    x = torch.randn(1, length + 3, 32)
    valid = (torch.arange(length + 3) < length).unsqueeze(0)
    given: list[Tensor] = []
    for each in (ours, plain):
        each.out_proj.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][:, :length]))
        each(x, query_valid=valid)
    values = ours.v_proj(x)[0, :length]
    expected = torch.zeros(length, 32)
    for position in range(length):
        for tap in range(5):
            if 0 <= position + tap - 2 < length:
                taps = ours.nearby.weight[:, tap].repeat_interleave(8)
                expected[position] += taps * values[position + tap - 2]
    torch.testing.assert_close(given[0][0] - given[1][0], expected, atol=1e-5, rtol=0)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(MtkitError, match="conv_kernel = 4 must be odd, or 0 for no convolution"):
        make(conv_kernel=4)
    with pytest.raises(MtkitError, match="pinv_iters = 21 must be a whole number from 1 to 20"):
        make(pinv_iters=21)


@pytest.mark.peer
@torch.no_grad()
def test_it_agrees_with_nystrom_attention() -> None:
    """One segment of one head, so that the scale it takes of all is that of one; a multiple of m, and no padding."""
    peer = pytest.importorskip("nystrom_attention")
    ours = make(heads=1, landmarks=8, conv_kernel=5).double()
    theirs = peer.NystromAttention(32, dim_head=32, heads=1, num_landmarks=8, residual_conv_kernel=5).double().eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(ours, name).bias.zero_()
    theirs.to_qkv.weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.res_conv.weight.copy_(ours.nearby.weight[:, None, :, None])
    theirs.to_out[0].load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(1, 40, 32, dtype=torch.double)
    torch.testing.assert_close(ours(x).output, theirs(x), rtol=1e-8, atol=1e-10)
