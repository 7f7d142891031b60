"""CSALR: its closed forms, what it tends to where little is added to M, and matrices that are all but singular."""

from itertools import pairwise

import pytest
import torch

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.small import maker

make = maker("csalr", seed=5)


@pytest.mark.parametrize("gamma", [1.1, 3.0])
@pytest.mark.parametrize("rescale", [True, False])
@torch.no_grad()
def test_constant_values_come_out_as_they_are(gamma: float, rescale: bool) -> None:
    """M 1 = 1, so that rows of the map sum to 1 / (1 + gamma) where they are not rescaled."""
    ours = make(landmarks=6, gamma=gamma, rescale=rescale)
    ours.v_proj.weight.zero_()
    ours.v_proj.bias.fill_(1.0)
    ours.out_proj.weight.copy_(torch.eye(32))
    x, valid = torch.randn(2, 40, 32), torch.arange(40) < torch.tensor([[40], [11]])
    output = ours(x, query_valid=valid).output[valid]
    expected = torch.full_like(output, 1.0 if rescale else 1 / (1 + gamma))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_landmarks_that_are_the_tokens_tend_to_full_attention() -> None:
    """Each of m tokens comes r times: A (A + gamma I)^-1 A V, which is nearer to A V the smaller gamma is."""
    full, ours = make(name="full").double(), make(landmarks=6, rescale=False).double()
    for each in (full.q_proj, full.k_proj):
        each.weight *= 3
    ours.adopt(full.state_dict())
    x = torch.randn(2, 6, 32, dtype=torch.double)
    repeated = x.repeat_interleave(3, 1)
    expected, apart = full(repeated).output, []
    q, k, v = ours.queries_keys_values(x)
    a = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    for gamma in (1.0, 1e-3, 1e-6, 1e-9):
        ours.gamma = gamma  # the option starts above 1, below which M + gamma I may be singular
        output = ours(repeated).output
        heads = a @ torch.linalg.inv(a + gamma * torch.eye(6).double()) @ a @ v
        torch.testing.assert_close(output[:, ::3], ours.merge_heads(heads, x), atol=1e-8, rtol=0)
        apart.append((output - expected).norm() / expected.norm())
    assert apart[0] > 0.1
    for wide, narrow in pairwise(apart[1:]):  # by a factor of a thousand, as gamma
        assert narrow < 2e-3 * wide


@torch.no_grad()
def test_much_on_the_diagonal_leaves_what_landmarks_have_read() -> None:
    """(1 + gamma) (M + gamma I)^-1 tends to I: each query gets the mean of B V over the landmarks it resembles."""
    ours = make(landmarks=5, gamma=1e6)
    x = torch.randn(1, 20, 32)
    q, k, v = ours.queries_keys_values(x)
    mean_q, mean_k = (each.unflatten(2, (5, 4)).mean(3) for each in (q, k))
    read = (mean_q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
    heads = (q @ mean_k.transpose(-1, -2) / 8**0.5).softmax(-1) @ read
    torch.testing.assert_close(ours(x).output, ours.merge_heads(heads, x), atol=1e-5, rtol=0)


def test_landmarks_that_see_nothing_but_each_other_stay_finite() -> None:
    """M = (0 1; 1 0) in float32, which has the eigenvalue -1."""
    ours = make(landmarks=2, heads=1)
    with torch.no_grad():
        for linear in (ours.q_proj, ours.k_proj):
            linear.weight.zero_()
        ours.q_proj.weight[:2, :2] = torch.tensor([[0.0, 300.0], [300.0, 0.0]])
        ours.k_proj.weight[:2, :2] = 300.0 * torch.eye(2)
    x = torch.randn(1, 8, 32)
    x[:, :4, :2], x[:, 4:, :2] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    x.requires_grad_()
    q, k, _ = ours.queries_keys_values(x)
    mean_q, mean_k = (each.unflatten(2, (2, 4)).mean(3) for each in (q, k))
    assert (mean_q @ mean_k.transpose(-1, -2)).softmax(-1).tolist() == [[[[0.0, 1.0], [1.0, 0.0]]]]
    output = ours(x).output
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(each.grad is None or each.grad.isfinite().all() for each in ours.parameters())


@pytest.mark.parametrize("gamma", [1.1, 1.5])
@pytest.mark.parametrize("scale", [5.0, 30.0])
def test_peaked_scores_multiply_values_by_no_more_than_gamma_allows(gamma: float, scale: float) -> None:
    """The heads of two layers, and the gradient of their sum."""
    torch.manual_seed(0)
    layers = [build("csalr", role="encoder", d_model=32, heads=4, layer=i, layers=2, gamma=gamma) for i in range(2)]
    x = (torch.randn(2, 100, 32) * scale).requires_grad_()
    heads: list[torch.Tensor] = []
    for layer in layers:
        layer.out_proj.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
    between = x + layers[0](x).output
    layers[1](between).output.sum().backward()
    for layer, tokens, found in zip(layers, (x, between), heads, strict=True):
        assert found.abs().max() <= (1 + gamma) / (gamma - 1) * layer.v_proj(tokens).abs().max()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_a_gamma_that_leaves_the_matrix_nearly_singular_is_refused(gamma: float) -> None:
    with pytest.raises(MtkitError, match=rf"gamma = {gamma} must be a number from 1.1 to"):
        make(gamma=gamma)
