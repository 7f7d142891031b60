"""Mechanisms of several kinds in the heads of one layer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, build
from mtkit.attention.mixed_heads import MixedHeads, as_full, kinds_of
from mtkit.attention.registry import find
from mtkit.errors import MtkitError

SITE: dict[str, Any] = {"d_model": 32, "heads": 8}


def random_full(role: str = "encoder", **site: Any) -> Attention:
    """`full` with 8 heads and random weights and biases."""
    full = build("full", role=role, **(SITE | site)).eval()
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.normal_(std=0.3)
    return full


def softmax_heads(full: Attention, x: Tensor, masks: list[Tensor]) -> Tensor:
    """Multi-head attention by the equation, head by head; masks (T, T) are True for the keys that a head sees."""
    q, k, v = (
        (x @ getattr(full, name).weight.T + getattr(full, name).bias).chunk(len(masks), -1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    heads = []
    for head, mask in enumerate(masks):
        scores = (q[head] @ k[head].transpose(-1, -2)) * q[head].shape[-1] ** -0.5
        heads.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[head])
    return torch.cat(heads, -1) @ full.out_proj.weight.T + full.out_proj.bias


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_two_shares_of_full_equal_full_with_its_weights(role: str) -> None:
    full, mix = random_full(role), build("full:3+full:5", role=role, **SITE).eval()
    mix.adopt(full.state_dict())
    query, memory = torch.randn(2, 7, 32), torch.randn(2, 5, 32) if role == "cross" else None
    one, other = (attention(query, memory, need_weights=True) for attention in (full, mix))
    torch.testing.assert_close(other.output, one.output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(other.weights, one.weights, atol=1e-6, rtol=1e-5)
    assert sum(p.numel() for p in mix.parameters()) == sum(p.numel() for p in full.parameters())


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_each_kind_has_the_heads_in_the_order_of_the_name(causal: bool) -> None:
    role = "decoder" if causal else "encoder"
    full = random_full(role)
    mix = build("band:2+full:5+strided:1", role=role, **SITE, **{"band.window_radius": 1, "stride": 3}).eval()
    mix.adopt(full.state_dict())
    i, j = torch.arange(9)[:, None], torch.arange(9)
    past = j <= i if causal else torch.ones(9, 9, dtype=torch.bool)
    seen = [(i - j).abs() <= 1] * 2 + [past] * 5 + [(i - j) % 3 == 0]
    x = torch.randn(2, 9, 32)
    attended = mix(x, need_weights=True)
    expected = softmax_heads(full, x, [mask & past for mask in seen])
    torch.testing.assert_close(attended.output, expected, atol=1e-5, rtol=1e-5)
    assert attended.weights is not None
    assert torch.equal((attended.weights > 0).all(0), torch.stack([mask & past for mask in seen]))


def test_initial_weights_have_the_range_of_one_layer() -> None:
    """Xavier's limit is sqrt(6 / (rows + columns)) of the whole matrix, not of a kind's slice of it."""
    torch.manual_seed(1)
    mix = build("full:2+band:2", role="encoder", d_model=256, heads=4)
    assert isinstance(mix, MixedHeads)
    for part in mix.parts:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weight = part.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            assert weight.abs().max().item() == pytest.approx((6 / 512) ** 0.5, rel=1e-3)


@torch.no_grad()
def test_a_mix_and_full_adopt_each_other() -> None:
    full = random_full()
    mix = build("full:3+full:5", role="encoder", **SITE).eval()
    mix.adopt(full.state_dict())
    state = as_full(mix.state_dict())
    assert all(torch.equal(state[name], value) for name, value in full.state_dict().items())
    assert as_full(full.state_dict()).keys() == full.state_dict().keys()


def test_weights_are_joined_only_if_every_kind_has_them() -> None:
    query = torch.randn(2, 6, 32)
    assert build("full:4+linear:4", role="encoder", **SITE)(query, need_weights=True).weights is None
    assert not find("full:4+linear:4").weights
    weights = build("full:4+band:4", role="encoder", **SITE)(query, need_weights=True).weights
    assert weights is not None
    assert weights.shape == (2, 8, 6, 6)


def test_learned_numbers_are_at_the_heads_of_their_kind() -> None:
    learned = build("full:2+sink:3+sink:3", role="encoder", **SITE).learned_numbers()
    (values,) = [value for name, value in learned.items() if "sink" in name]
    assert values.isnan().tolist() == [True] * 2 + [False] * 6


def test_losses_and_carries_of_all_kinds_are_passed_on() -> None:
    mix = build("realformer:4+full:4", role="encoder", layers=2, **SITE, **{"full.regularizer": "disagreement"})
    attended = mix.train()(torch.randn(2, 6, 32))
    assert attended.losses
    assert attended.carry is not None
    assert attended.carry[1] is None
    twice = {f"{kind}.regularizer": "disagreement" for kind in ("full", "band")}
    both = build("full:4+band:4", role="encoder", **SITE, **twice).train()
    query = torch.randn(2, 6, 32)
    parts = [part(query).losses for part in both.parts]
    total = both(query).losses
    assert total.keys() == parts[0].keys()
    for name, loss in total.items():
        torch.testing.assert_close(loss, parts[0][name] + parts[1][name])


def test_the_shortest_limit_of_length_holds() -> None:
    site = {**SITE, "max_length": 50, "role": "encoder"}
    assert build("full:4+band:4", **site).longest is None
    assert build("full:4+synthesizer:4", **site).longest == build("synthesizer", **site).longest


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("full:4", {}, "must have two kinds or more"),
        ("full:8+band:0", {}, "of one head or more"),
        ("full:4+band", {}, "write NAME:HEADS for each kind"),
        ("full:4+bandd:4", {}, "no attention mechanism 'bandd' (did you mean 'band'?)"),
        ("full:4+average:4", {}, "attention 'average' is a whole layer"),
        ("full:4+band:2", {}, "has 6 heads, and the model 8"),
        ("full:4+band:4", {"window": 3}, "has no option 'window'"),
        ("full:4+band:4", {"band.window_radius": -1}, "attention 'band': window_radius = -1 must be"),
        ("full:4+band:4", {"merge": "gated"}, "cannot combine with merge, which reads all heads of a layer"),
        ("full:4+linear:4", {"positions": "alibi"}, "attention 'linear' cannot combine with positions=alibi"),
        ("multi-query:4+full:4", {"projection": "multi-query"}, "attention 'multi-query' is itself a projection"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError) as error:
        build(name, role="encoder", **SITE, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_role_that_one_kind_lacks_is_refused() -> None:
    with pytest.raises(MtkitError, match="cannot play the role 'cross'; it can play: encoder, decoder"):
        build("full:4+band:4", role="cross", **SITE)


def test_names_of_mixes() -> None:
    assert kinds_of("band") is None
    assert kinds_of(" full:4 + low-rank-band:12 ") == [("full", 4), ("low-rank-band", 12)]
    assert find("full:4 + band:4").name == "full:4+band:4"
