"""Random feature attention: the kernel that its waves estimate, how fast, and a state that does not grow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention
from mtkit.attention.linear._random_features import sine
from mtkit.memory import held_bytes
from tests.attention.small import ROLES, adopting, check_zero_keys, maker, refusals

make = maker("rfa")


def kernel(rfa: Any, q: Tensor, k: Tensor) -> Tensor:
    """The products (H, T, S) of the features of q (T, K) and k (S, K)."""
    one, other = (rfa._features(x.expand(1, 4, *x.shape)).features[0] for x in (q, k))
    products: Tensor = one @ other.mT
    return products


@torch.no_grad()
def test_products_of_waves_are_a_gaussian_kernel_in_the_mean() -> None:
    q, k = torch.randn(2, 3, 8, dtype=torch.float64)
    sigma = 0.5 + torch.rand(4, 8, dtype=torch.float64)
    unit_q, unit_k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    apart = (sigma[:, None, None] * (unit_q[:, None] - unit_k)).square().sum(-1)
    products = []
    for seed in range(150):
        rfa = make("encoder", seed=seed, tau=1.3).double()
        rfa.sigma.copy_(sigma)
        products.append(kernel(rfa, q, k))
    drawn = torch.stack(products)
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - (-apart / (2 * 1.3**2)).exp()).abs() < 4 * error).all()
    assert error.max() < 0.02


@torch.no_grad()
def test_products_of_arc_cosine_features_are_its_kernel_in_the_mean() -> None:
    """With the angle a between them: (sin a + (pi - a) cos a) / (2 pi)."""
    q, k = torch.randn(2, 3, 8, dtype=torch.float64)
    angle = torch.cosine_similarity(q[:, None], k, dim=-1).acos()
    wanted = (angle.sin() + (torch.pi - angle) * angle.cos()) / (2 * torch.pi)
    drawn = torch.stack(
        [kernel(make("encoder", seed=seed, feature_map="arc-cosine").double(), q, k) for seed in range(100)]
    )
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - wanted).abs() < 4 * error).all()
    assert error.max() < 0.02


def unit_tokens(role: str, dtype: torch.dtype) -> tuple[Attention, Tensor, float]:
    """`full` over unit vectors that are their own queries and keys, the tokens, and the tau of its softmax."""
    full = make(role, "full", heads=1).to(dtype)
    with torch.no_grad():
        for projection in (full.q_proj, full.k_proj):
            projection.weight.copy_(2 * torch.eye(32))
    x = torch.nn.functional.normalize(torch.randn(2, 24, 32, dtype=dtype), dim=-1)
    return full, x, 32**0.25 / 2  # 4 q . k / sqrt(32) = q . k / tau^2


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_the_error_against_softmax_attention_halves_with_four_times_the_features(role: str) -> None:
    full, x, tau = unit_tokens(role, torch.float64)
    wanted = full(x).output

    def error(features: int) -> float:
        each = [adopting(make, full, heads=1, tau=tau, features=features, seed=seed).double() for seed in range(8)]
        return torch.stack([(rfa(x).output - wanted).norm() for rfa in each]).mean().item() / wanted.norm().item()

    few, many = error(1024), error(4096)
    assert few / many == pytest.approx(2.0, abs=0.3)
    assert many < 0.05


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("options", [{}, {"features": 3}, {"projection": "multi-query"}])
def test_keys_that_are_all_alike_give_the_uniform_mean(role: str, options: dict[str, Any]) -> None:
    check_zero_keys(make, role, chunk=4, **options)


@pytest.mark.parametrize("role", ROLES)
def test_one_visible_key_is_its_value(role: str) -> None:
    """However small its similarity: nothing may be added to the denominator."""
    full = make(role, "full")
    x, memory = torch.randn(20, 1, 32), torch.randn(20, 1, 32) if role == "cross" else None
    got = adopting(make, full, tau=2.0)(x, memory).output
    torch.testing.assert_close(got, full(x, memory).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_the_length_of_queries_and_keys_does_not_matter(role: str) -> None:
    rfa, x = make(role).double(), torch.randn(2, 9, 32, dtype=torch.float64)
    memory = torch.randn(2, 9, 32, dtype=torch.float64) if role == "cross" else None
    wanted = rfa(x, memory).output
    for projection in (rfa.q_proj, rfa.k_proj):
        projection.weight.mul_(5.0)
    torch.testing.assert_close(rfa(x, memory).output, wanted)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_a_denominator_is_at_least_a_thousandth_for_each_visible_key(role: str) -> None:
    """Where no similarity is positive the output is a thousand times the mean; padding adds nothing to the floor."""
    rfa = make(role, feature_map="arc-cosine").double()
    plain = rfa.features_of
    rfa.features_of = lambda x, *p: plain(x, *p)._replace(features=1e-3 * plain(x, *p).features)  # products of 1e-6
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    memory = torch.randn(1, 6, 32, dtype=torch.float64) if role == "cross" else None
    valid = torch.tensor([[True] * 4 + [False] * 2])
    masks = {"query_valid": valid} if memory is None else {"memory_valid": valid}
    phi_q = rfa._features(rfa.queries(x)).features
    k, v = rfa.keys_values(x if memory is None else memory)
    products = phi_q @ rfa._features(k).features.mT * valid[:, None, None]
    counts = torch.tensor([4.0] * 6)
    if role == "decoder":
        products, counts = products.tril(), torch.arange(1.0, 7.0)
    wanted = rfa.out_proj((products @ v / (1e-3 * counts[:, None])).transpose(1, 2).flatten(2))
    torch.testing.assert_close(rfa(x, memory, **masks).output[:, :4], wanted[:, :4])
    if role != "encoder":
        state, _ = rfa.start(1, memory, None if memory is None else valid)
        for t in range(4):
            attended, state = rfa.step(x[:, t : t + 1], state)
            torch.testing.assert_close(attended.output, wanted[:, t : t + 1])


@torch.no_grad()
def test_the_state_takes_as_many_bytes_at_step_2000_as_at_step_100() -> None:
    rfa = make("decoder", d_model=8, heads=2, features=3)
    state, _ = rfa.start(1)
    sizes = {}
    for step in range(1, 2001):
        _, state = rfa.step(torch.randn(1, 1, 8), state)
        if step in (100, 2000):
            sizes[step] = held_bytes(state)
    assert sizes[100] == sizes[2000]
    assert state["count"] == 2000


def test_the_state_of_the_source_does_not_grow_with_it() -> None:
    cross = make("cross")
    sizes = [held_bytes(cross.start(2, torch.randn(2, length, 32))[0]) for length in (50, 500)]
    assert sizes[0] == sizes[1]


def test_training_picks_another_matrix_after_each_update_and_evaluation_keeps_its_own() -> None:
    rfa, x = make("decoder", pool=5), torch.randn(1, 7, 32)
    wanted, first = rfa(x).output, rfa.drawn.clone()
    seen = {first[0, 0, 0].item()}
    for update in range(1, 60):
        rfa.after_update(update, 100)
        seen.add(rfa.drawn[0, 0, 0].item())
    assert len(seen) == 5
    assert rfa.fixed[0, 0, 0].item() in seen
    assert torch.equal(rfa(x).output, wanted)
    other = make("decoder", pool=5)
    other.load_state_dict(rfa.state_dict())
    assert torch.equal(other.train()(x).output, rfa.train()(x).output)
    other.after_update(59, 100)
    assert torch.equal(other.drawn, rfa.drawn)


def test_a_pool_of_one_trains_with_the_matrix_of_evaluation() -> None:
    rfa = make("decoder", pool=1)
    rfa.after_update(3, 100)
    assert torch.equal(rfa.drawn, rfa.fixed)


def test_directions_belong_to_seed_role_layer_and_head() -> None:
    sites: list[dict[str, Any]] = [{}, {"seed": 2}, {"layer": 1, "layers": 2}]
    drawn = [*(make("decoder", **site).fixed for site in sites), make("encoder").fixed]
    heads = [head for each in drawn for head in each]
    assert all(not torch.equal(one, other) for i, one in enumerate(heads) for other in heads[:i])
    torch.manual_seed(5)
    assert torch.equal(make("decoder").fixed, drawn[0])


def test_each_head_learns_a_sigma_that_starts_at_one() -> None:
    rfa, plain, x = make("encoder"), make("encoder", learn_sigma=False), torch.randn(2, 9, 32)
    plain.load_state_dict({name: value for name, value in rfa.state_dict().items() if name != "sigma"})
    torch.testing.assert_close(rfa(x).output, plain(x).output)
    rfa(x).output.square().sum().backward()
    assert (rfa.sigma.grad.abs().amax(-1) > 0).all()
    with torch.no_grad():
        rfa.sigma[1] *= 2
    assert not torch.allclose(rfa(x).output, plain(x).output, atol=1e-4)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"feature_map": "sin"}, "did you mean 'sine'"),
    ({"features": 0}, "features = 0"),
    ({"tau": 0.0}, "tau = 0"),
    ({"pool": 0}, "pool = 0"),
    ({"positions": "alibi"}, "alibi"),
    role="decoder",
)


def test_sine_features_and_their_gradients_are_right() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sine(x, 0.3), x)
    plain = torch.cat([x.sin(), x.cos()], -1) * 0.3
    torch.testing.assert_close(sine(x, 0.3), plain)
