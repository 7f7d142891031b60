"""Performer: what its random features estimate, how fast, and a stabiliser that no output can see."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtkit.attention.linear.performer import FEATURE_MAPS, draw_directions
from tests.attention.small import ROLES, adopting, check_zero_keys, maker, refusals
from tests.contract.counting import saved_tensors

SOFTMAX = ["positive", "hyperbolic", "trig"]

make = maker("performer")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(feature_map: str, x: Tensor, directions: Tensor) -> Tensor:
    made = FEATURE_MAPS[feature_map](x @ directions.T, x.square().sum(-1, keepdim=True) / 2)
    return made.features if made.scale is None else made.features * made.scale.exp()


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("feature_map", SOFTMAX)
def test_products_of_features_are_exponentials_of_products_in_the_mean(feature_map: str, orthogonal: bool) -> None:
    q, k = 0.4 * torch.randn(2, 8, dtype=torch.float64)
    products = torch.stack(
        [
            features(feature_map, q, w) @ features(feature_map, k, w)
            for w in (draw_directions(40, 8, orthogonal=orthogonal, generator=generator(seed)) for seed in range(600))
        ]
    )
    error = products.std() / len(products) ** 0.5
    assert (products.mean() - (q @ k).exp()).abs() < 4 * error
    assert error < 0.05 * (q @ k).exp()


def test_directions_of_a_block_are_at_right_angles_and_as_long_as_normal_vectors() -> None:
    w = draw_directions(20, 8, orthogonal=True, generator=generator(1))
    assert w.shape == (20, 8)
    for block in w.split(8):
        products = block @ block.T
        assert (products - products.diag().diag()).abs().max() < 1e-10
    many = draw_directions(80_000, 8, orthogonal=True, generator=generator(2))
    assert many.mean().abs() < 0.01
    assert many.square().mean().item() == pytest.approx(1.0, abs=0.01)
    assert many.pow(4).mean().item() == pytest.approx(3.0, abs=0.1)


@torch.no_grad()
def test_the_error_halves_with_four_times_the_features() -> None:
    """At scores of this size; with larger ones it hardly falls at all."""
    full = make("encoder", "full", d_model=32, heads=1).double()
    for projection in (full.q_proj, full.k_proj):
        projection.weight.copy_(0.4 * torch.eye(32))
    x = torch.randn(1, 32, 32, dtype=torch.float64)
    wanted = full(x).output

    def error(count: int) -> float:
        drawn = [adopting(make, full, heads=1, features=count, seed=seed).double()(x).output for seed in range(8)]
        return torch.stack([(each - wanted).norm() for each in drawn]).mean().item()

    assert error(2048) / error(8192) == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("options", [{}, {"features": 3}, {"feature_map": "hyperbolic"}, {"feature_map": "relu"}])
def test_keys_that_are_all_zero_give_the_uniform_mean(role: str, options: dict[str, Any]) -> None:
    check_zero_keys(make, role, chunk=4, **options)


@pytest.mark.parametrize("feature_map", ["positive", "hyperbolic"])
@torch.no_grad()
def test_exponents_beyond_float32_cancel(feature_map: str) -> None:
    """A common shift of all keys multiplies every similarity by e^1000 or e^-1000 and changes no output."""
    performer = make("decoder", feature_map=feature_map, chunk=4).double()
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    wanted = performer(x).output
    plain = performer.features_of
    for shift in (1000.0, -1000.0):
        performer.features_of = lambda x, s=shift: plain(x)._replace(scale=plain(x).scale + s)
        torch.testing.assert_close(performer(x).output, wanted)


@pytest.mark.parametrize("feature_map", list(FEATURE_MAPS))
@torch.no_grad()
def test_a_later_key_with_a_huge_exponent_moves_no_earlier_output(feature_map: str) -> None:
    performer, x = make("decoder", feature_map=feature_map, chunk=4).double(), torch.randn(1, 24, 32).double()
    wanted = performer(x).output[:, :14]
    changed = torch.cat([x[:, :14], 30 * x[:, 14:]], dim=1)
    assert (performer(changed).output[:, :14] - wanted).abs().max() < 1e-12


def test_directions_change_by_update_alone_and_are_saved() -> None:
    performer = make("decoder", redraw=10)
    first = performer.directions.clone()
    performer.train()(torch.randn(1, 4, 32))
    performer.after_update(9, 100)
    assert torch.equal(performer.directions, first)
    performer.after_update(10, 100)
    second = performer.directions.clone()
    assert not torch.equal(second, first)
    other = make("decoder", redraw=10)
    other.load_state_dict(performer.state_dict())
    assert torch.equal(other.directions, second)
    for each in (performer, other):
        each.after_update(20, 100)
    assert torch.equal(other.directions, performer.directions)
    assert not torch.equal(performer.directions, second)


def test_directions_belong_to_seed_role_and_layer() -> None:
    sites: list[dict[str, Any]] = [{}, {"seed": 2}, {"layer": 1, "layers": 2}]
    drawn = [make("decoder", **site).directions for site in sites] + [make("encoder").directions]
    assert all(not torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])
    torch.manual_seed(5)
    assert torch.equal(make("decoder").directions, drawn[0])


def test_features_are_k_ln_k_unless_said() -> None:
    assert make("encoder", d_model=128, heads=2).directions.shape == (266, 64)
    assert make("encoder", d_model=4, heads=4).directions.shape == (1, 1)


def test_what_backward_keeps_grows_with_the_length_and_no_faster() -> None:
    def kept(length: int) -> int:
        performer, x = make("decoder", chunk=16), torch.randn(1, length, 32)
        return sum(saved.numel() for saved in saved_tensors(lambda: performer(x)))

    assert kept(1024) < 4.1 * kept(256)


@pytest.mark.parametrize("feature_map", list(FEATURE_MAPS))
@torch.no_grad()
def test_a_step_costs_and_keeps_the_same_at_any_position(feature_map: str) -> None:
    performer = make("decoder", feature_map=feature_map, features=6)
    state, _ = performer.start(2, hypotheses=3)

    def cost(position: int) -> tuple[int, dict[str, torch.Size]]:
        with FlopCounterMode(display=False) as counter:
            _, after = performer.step(torch.randn(2, 3, 32), {**state, "count": position})
        return counter.get_total_flops(), {name: x.shape for name, x in after.items() if torch.is_tensor(x)}

    assert cost(10) == cost(10_000)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"feature_map": "positiv"}, "did you mean 'positive'"),
    ({"features": 0}, "features = 0"),
    ({"redraw": -1}, "redraw = -1"),
    ({"chunk": 0}, "chunk = 0"),
    ({"positions": "alibi"}, "alibi"),
    role="decoder",
)
