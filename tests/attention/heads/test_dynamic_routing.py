"""Dynamic routing: its limit with one iteration, the loop written out, and whom it listens to."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.contract import Site
from mtkit.attention.heads.dynamic_routing import DynamicRouting
from mtkit.errors import MtkitError


def make(heads: int = 4, width: int = 6, **options: Any) -> DynamicRouting:
    """Capsules 3 of width 8 in float64."""
    routing = DynamicRouting(Site("encoder", heads * width, heads), width, **{"capsules": 3} | options).double()
    torch.nn.init.normal_(routing.votes, std=0.5)
    return routing


def loop(routing: DynamicRouting, heads: Tensor) -> Tensor:
    """The capsules of one token, from heads (H, V), as the papers write them."""
    count, size = routing.capsules, heads.numel() // routing.capsules
    votes = torch.stack([o @ w for o, w in zip(heads, routing.votes, strict=True)]).view(-1, count, size)
    agreement = [[torch.zeros((), dtype=heads.dtype)] * count for _ in heads]
    for _ in range(routing.iterations):
        shares = [[each.exp() / sum(b.exp() for b in row) for each in row] for row in agreement]
        capsules = []
        for n in range(count):
            total = sum(shares[a][n] for a in range(len(heads)))
            mean = sum(shares[a][n] * votes[a, n] for a in range(len(heads))) / total
            length = mean.norm()
            capsules.append(length**2 / (1 + length**2) * mean / length if routing.squash else mean)
        agreement = [[agreement[a][n] + capsules[n] @ votes[a, n] for n in range(count)] for a in range(len(heads))]
    return torch.cat(capsules)


@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_the_capsules_are_those_of_the_loop(iterations: int, squash: bool) -> None:
    routing = make(iterations=iterations, squash=squash)
    heads = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    got = routing(heads)
    assert got.shape == (2, 5, 24)
    for b, t in ((0, 0), (1, 4)):
        torch.testing.assert_close(got[b, t], loop(routing, heads[b, :, t]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_one_iteration_without_squash_is_full(role: str) -> None:
    """W_O = [W_an] / h, which with votes of h times the identity is the heads side by side."""
    full = build("full", role=role, d_model=32, heads=4)
    routing = build("dynamic-routing", role=role, d_model=32, heads=4, iterations=1, squash=False)
    routing.load_state_dict(full.state_dict() | {"merge.votes": 4 * torch.eye(32).view(4, 8, 32)})
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32) if role == "cross" else None
    torch.testing.assert_close(routing(x, memory).output, full(x, memory).output, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_all_iterations() -> None:
    routing, heads = make(), torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(routing, heads)
    (first,) = torch.autograd.grad(routing(heads).sum(), routing.votes)
    routing.iterations = 1
    (only_last,) = torch.autograd.grad(routing(heads).sum(), routing.votes)
    assert not torch.allclose(first, only_last, rtol=1e-2)


def test_a_head_is_shared_out_among_capsules_and_not_a_capsule_among_heads() -> None:
    """One head votes for both capsules alike: its shares stay equal, whatever others do, and add up to 1."""
    routing = make(2, 2, capsules=2, iterations=2, squash=False)
    votes = torch.tensor([[1.0, 1.0], [6.0, -2.0]]).double()[:, :, None, None]  # (H, N, P, R)
    first = votes.mean(0).squeeze()  # 3.5 and -0.5
    shares = torch.stack([votes[a].squeeze() * first for a in range(2)]).softmax(1)  # (H, N), over capsules
    expected = (shares * votes.squeeze()).sum(0) / shares.sum(0)
    torch.testing.assert_close(routing.routed(votes).squeeze(), expected)


def test_a_head_that_contradicts_the_others_counts_less() -> None:
    votes = 1 + 0.1 * torch.randn(5, 2, 3, dtype=torch.float64)
    votes[4, 0] = -2.0
    plain, routed = (make(5, 6, capsules=2, iterations=count, squash=False) for count in (1, 3))
    four = votes[:4, 0].mean(0)
    far, near = ((each.routed(votes.unsqueeze(-1))[0, :, 0] - four).norm() for each in (plain, routed))
    assert near < 0.5 * far


def test_squashed_capsules_are_shorter_than_1_and_keep_their_direction() -> None:
    heads = 100 * torch.randn(2, 4, 5, 6, dtype=torch.float64)
    squashed, plain = (make(iterations=1, squash=each) for each in (True, False))
    plain.load_state_dict(squashed.state_dict())
    one, other = (each(heads).unflatten(-1, (3, 8)) for each in (squashed, plain))
    assert one.norm(dim=-1).max() < 1
    torch.testing.assert_close(torch.cosine_similarity(one, other, dim=-1), torch.ones(2, 5, 3).double())


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e3])
def test_outputs_and_gradients_are_finite_at_any_size(size: float) -> None:
    """At 1e3 all shares of a capsule may underflow."""
    routing = make().float()
    x = (size * torch.randn(2, 4, 5, 6)).requires_grad_()
    output = routing(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert output.isfinite().all()
    assert gradient.isfinite().all()
    assert size or not output.any()


def test_capsules_divide_the_width() -> None:
    with pytest.raises(MtkitError, match="capsules = 5 must divide the heads' joint width 32"):
        build("dynamic-routing", role="encoder", d_model=32, heads=4, capsules=5)
