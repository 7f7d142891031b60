"""Relative positions: the identities that the papers state, through `full` where they are about attention."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, Site, build
from mtkit.attention.positions import POSITIONS, Alibi, Rotary, Shaw
from mtkit.errors import MtkitError


def make(positions: Any = None, role: str = "encoder", **site: Any) -> Attention:
    return build("full", **{"role": role, "d_model": 32, "heads": 4} | site, positions=positions).eval()


def like(attention: Attention, positions: Any) -> Attention:
    """The same weights with other positions around them; every table of theirs at its initial value."""
    other = make(positions, attention.site.role, d_model=attention.site.d_model, heads=attention.site.heads)
    other.load_state_dict(attention.state_dict(), strict=False)
    return other


def site(role: str = "encoder", heads: int = 4) -> Site:
    return Site(role, 8 * heads, heads)


@pytest.mark.parametrize("name", sorted(POSITIONS))
def test_the_cross_role_has_no_relative_positions(name: str) -> None:
    with pytest.raises(MtkitError, match="cross"):
        make(name, "cross")


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_shaw_with_zero_tables_is_full(role: str) -> None:
    full, x = make(role=role), torch.randn(2, 9, 32)
    torch.testing.assert_close(like(full, "shaw")(x).output, full(x).output, rtol=1e-5, atol=1e-5)


def test_shaw_adds_a_vector_for_each_clipped_distance_to_keys_and_values() -> None:
    shaw = Shaw(site(), 8, clip=2)
    for table in (shaw.keys, shaw.value_table):
        torch.nn.init.normal_(table)
    q, weights = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 6).softmax(-1)
    place = torch.arange(6)
    bias, values = shaw.bias(q, place, place, 0.5), shaw.values(weights, place, place)
    assert bias is not None
    assert values is not None
    for i in range(6):
        rows = [min(max(j - i, -2), 2) + 2 for j in range(6)]
        torch.testing.assert_close(bias[:, :, i], 0.5 * q[:, :, i] @ shaw.keys[rows].T)
        torch.testing.assert_close(values[:, :, i], weights[:, :, i] @ shaw.value_table[rows])


def test_one_vector_in_all_of_shaws_key_rows_cancels_and_one_in_all_value_rows_is_added() -> None:
    full, x = make(), torch.randn(2, 9, 32)
    shaw = like(full, {"name": "shaw", "clip": 3})
    assert isinstance(shaw.positions, Shaw)
    with torch.no_grad():
        shaw.positions.keys.add_(torch.randn(8))
    torch.testing.assert_close(shaw(x).output, full(x).output, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        shaw.positions.value_table.add_(torch.ones(8))
        added = full(x).output + torch.ones(32) @ full.get_submodule("out_proj").weight.T  # type: ignore[operator]
    torch.testing.assert_close(shaw(x).output, added, rtol=1e-5, atol=1e-5)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    def slopes(heads: int) -> list[float]:
        bias = Alibi(site(heads=heads), 8).bias(torch.zeros(1, heads, 1, 8), torch.tensor([1]), torch.tensor([0]), 9.0)
        assert bias is not None
        return (-bias).flatten().tolist()  # at distance 1, and whatever the scale

    assert slopes(8) == [2.0**-a for a in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


def test_alibi_is_symmetric_and_exact_far_beyond_bfloat16() -> None:
    far = torch.tensor([0, 257, 4099])
    bias = Alibi(site(heads=8), 8).bfloat16().bias(torch.zeros(1, 8, 3, 8).bfloat16(), far, far, 1.0)
    assert bias is not None
    assert torch.equal(bias, bias.transpose(-1, -2))
    assert bias[0].tolist() == [[0, -128.5, -2049.5], [-128.5, 0, -1921.0], [-2049.5, -1921.0, 0]]


def test_alibi_in_a_decoder_may_be_counted_from_the_first_key() -> None:
    """A constant for each row cancels in the softmax, so that -m (i - j) is m j there."""
    alibi, x = make("alibi", "decoder"), torch.randn(1, 7, 32)
    weights = alibi(x, need_weights=True).weights
    scores = make_scores(alibi, x) + torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(4, 1, 1) * torch.arange(7)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(weights, scores.masked_fill(hidden, float("-inf")).softmax(-1))


def make_scores(attention: Attention, x: Tensor) -> Tensor:
    """Scaled scores of `full` without any positions."""
    q, k = (attention.get_submodule(name)(x).unflatten(-1, (4, 8)).transpose(1, 2) for name in ("q_proj", "k_proj"))
    return q @ k.transpose(-1, -2) / 8**0.5


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [8, 7])
def test_rotary_keeps_lengths_and_depends_on_the_distance_alone(half: bool, width: int) -> None:
    rotary = Rotary(site(), width, half=half)
    q, k, place = torch.randn(9, width), torch.randn(9, width), torch.arange(9)
    torch.testing.assert_close(rotary.rotate(q, place).norm(dim=-1), q.norm(dim=-1))
    here = rotary.rotate(q, place) @ rotary.rotate(k, place).T
    there = rotary.rotate(q, place + 100) @ rotary.rotate(k, place + 100).T
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(here, rotary.rotate(q, place) @ rotary.rotate(k, place + 1).T, atol=1e-2)
    assert torch.equal(rotary.rotate(q, torch.zeros(9)), q)


def turned_by_pairs(x: Tensor, places: Tensor, width: int) -> Tensor:
    """Equation 34 of RoFormer for channels 2i and 2i + 1 of x (..., T, K), pair by pair, in float64."""
    x, turned = x.double(), x.double().clone()
    for t, place in enumerate(places.tolist()):
        for i in range(width // 2):
            angle = place * 10_000.0 ** (-2 * i / (width // 2 * 2))
            one, other = x[..., t, 2 * i], x[..., t, 2 * i + 1]
            turned[..., t, 2 * i] = one * math.cos(angle) - other * math.sin(angle)
            turned[..., t, 2 * i + 1] = other * math.cos(angle) + one * math.sin(angle)
    return turned


@pytest.mark.parametrize("width", [8, 7, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_turns_each_pair_wherever_its_numbers_lie(width: int, dtype: torch.dtype) -> None:
    rotary, places = Rotary(site(), width), torch.tensor([0, 1, 5, 900])
    numbers = torch.randn(2, 3, 4, 2 * width + 1).to(dtype)
    close = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    # as heads lie; behind an odd number of others; every second number; the same row for all
    side_by_side, behind = numbers[..., :width].contiguous(), numbers[..., 1 : width + 1]
    for x in (side_by_side, behind, numbers[..., : 2 * width : 2], behind[:1].expand(2, -1, -1, -1)):
        turned = rotary.rotate(x, places)
        assert turned.dtype == dtype
        torch.testing.assert_close(turned.double(), turned_by_pairs(x, places, width), rtol=close, atol=close)


def test_gradients_of_rotary_agree_with_differences() -> None:
    rotary, x = Rotary(site(), 5), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary.rotate(x, torch.arange(3) + 7), [x])


def test_the_two_forms_of_rotary_agree_after_permuting_the_channels() -> None:
    pairs, halves = make("rotary"), make({"name": "rotary", "half": True})
    rows = torch.cat([8 * head + torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) for head in range(4)])
    state = pairs.state_dict()
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
        state[name] = state[name][rows]
    halves.load_state_dict(state)
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(halves(x).output, pairs(x).output)
    halves.load_state_dict(pairs.state_dict())
    assert not torch.allclose(halves(x).output, pairs(x).output, atol=1e-3)


def test_rotary_and_alibi_are_full_at_length_1() -> None:
    full, x = make(), torch.randn(2, 1, 32)
    for name in ("rotary", "alibi"):
        torch.testing.assert_close(like(full, name)(x).output, full(x).output)


def test_rotary_in_a_model_cast_to_bfloat16_still_tells_far_positions_apart() -> None:
    rotary, x, far = Rotary(site(), 8).bfloat16(), torch.ones(2, 8), torch.tensor([10_000, 10_001])
    exact = Rotary(site(), 8).rotate(x.double(), far).float()
    torch.testing.assert_close(rotary.rotate(x, far), exact)
    torch.testing.assert_close(rotary.rotate(x.bfloat16(), far).float(), exact, rtol=0.02, atol=0.02)
