"""EM routing: its limit with one iteration, the loop written out, and what its extremes give."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.contract import Site
from mtkit.attention.heads.em_routing import EmRouting
from mtkit.errors import MtkitError


def make(heads: int = 4, width: int = 6, **options: Any) -> EmRouting:
    """Capsules 3 of width 8 in float64, no parameter at zero."""
    routing = EmRouting(Site("encoder", heads * width, heads), width, **{"capsules": 3} | options).double()
    for parameter in routing.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return routing


def loop(routing: EmRouting, heads: Tensor) -> Tensor:
    """The capsules of one token, from heads (H, V), as the catalogue of the papers writes them."""
    count, size = routing.capsules, heads.numel() // routing.capsules
    votes = torch.stack([o @ w for o, w in zip(heads, routing.votes, strict=True)]).view(-1, count, size)
    share = torch.full((len(heads), count), 1 / count, dtype=heads.dtype)
    for iteration in range(routing.iterations):
        means, variances, activations = [], [], []
        for n in range(count):
            mass = share[:, n].sum()
            mean = sum(share[a, n] * votes[a, n] for a in range(len(heads))) / mass
            variance = sum(share[a, n] * (votes[a, n] - mean) ** 2 for a in range(len(heads))) / mass + 1e-8
            cost = sum((routing.cost[n] + variance[i].sqrt().log()) * mass for i in range(size))
            activations.append(torch.sigmoid(routing.em_lambda * (routing.threshold[n] - cost)))
            means.append(mean)
            variances.append(variance)
        if iteration + 1 < routing.iterations:
            joint = torch.stack(
                [
                    torch.stack(
                        [
                            activations[n]
                            * torch.distributions.Normal(means[n], variances[n].sqrt())
                            .log_prob(votes[a, n])
                            .sum()
                            .exp()
                            for n in range(count)
                        ]
                    )
                    for a in range(len(heads))
                ]
            )
            share = joint / joint.sum(-1, keepdim=True)
    return torch.cat([activation * mean for activation, mean in zip(activations, means, strict=True)])


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_capsules_are_those_of_the_loop(iterations: int) -> None:
    routing = make(iterations=iterations, em_lambda=0.3)
    heads = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    got = routing(heads)
    assert got.shape == (2, 5, 24)
    for b, t in ((0, 0), (1, 4)):
        torch.testing.assert_close(got[b, t], loop(routing, heads[b, :, t]), rtol=1e-7, atol=1e-9)


def test_one_iteration_is_a_linear_map_of_the_heads_side_by_side() -> None:
    """W_O = [W_an] / h, times the activation: one half where em_lambda is 0."""
    routing, heads = make(iterations=1, em_lambda=0.0), torch.randn(2, 4, 5, 6, dtype=torch.float64)
    linear = heads.transpose(1, 2).flatten(2) @ routing.votes.flatten(0, 1) / 4
    torch.testing.assert_close(routing(heads), 0.5 * linear)


def test_gradients_are_those_of_all_iterations() -> None:
    routing, heads = make(em_lambda=0.3), torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(routing, heads)
    routing(heads).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.all() for parameter in routing.parameters())


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("heads", [1, 4])
def test_outputs_and_gradients_are_finite_where_capsules_collapse(size: float, heads: int) -> None:
    routing = make(heads).float()
    x = (size * torch.randn(2, heads, 5, 6)).requires_grad_()
    output = routing(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert output.isfinite().all()
    assert gradient.isfinite().all()


def test_a_head_that_contradicts_the_others_counts_less() -> None:
    """Four heads vote alike for the first capsule, the fifth far off: routing moves the capsule towards the four."""
    votes = 0.1 * torch.randn(5, 2, 3, dtype=torch.float64)
    votes[4, 0] += 5.0
    plain, routed = (make(5, 6, capsules=2, iterations=count, em_lambda=0.0) for count in (1, 3))
    outputs = [2 * each.routed(votes.unsqueeze(-1))[0, :, 0] for each in (plain, routed)]
    four = votes[:4, 0].mean(0)
    assert math.dist(outputs[1].tolist(), four.tolist()) < 0.5 * math.dist(outputs[0].tolist(), four.tolist())


def test_nothing_attended_to_gives_nothing() -> None:
    assert not make()(torch.zeros(2, 4, 5, 6, dtype=torch.float64)).any()


def test_it_stands_before_out_proj_and_takes_over_the_rest_of_full() -> None:
    full = build("full", role="encoder", d_model=32, heads=4)
    routing = build("em-routing", role="encoder", d_model=32, heads=4)
    routing.adopt(full.state_dict())
    for name, value in full.state_dict().items():
        assert torch.equal(routing.state_dict()[name], value)


@pytest.mark.parametrize(("heads", "width", "capsules"), [(4, 8, 16), (3, 5, 15)])
def test_capsules_are_narrow_unless_told(heads: int, width: int, capsules: int) -> None:
    assert make(heads, width, capsules=None).capsules == capsules


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(MtkitError, match="capsules = 5 must divide"):
        make(capsules=5)
