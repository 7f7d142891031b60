"""Streaming attention: the softmax over a cache with its own numbering, its limits, and what it sees and keeps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.bases.caches import exact_capacity
from mtkit.attention.positions import Rotary
from tests.attention.small import maker, refusals, tokens

make = maker("streaming", "decoder", double=True, seed=0)


def cached(attention: Any, x: Tensor, first: int, radius: int, *, rotary: bool) -> Tensor:
    """Each query over a list of what its cache holds, in which places alone are positions."""
    q, k, v = (linear(x).unflatten(-1, (4, 8)) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    turn = Rotary(attention.site, 8)
    rows = []
    for i in range(x.shape[1]):
        held = sorted({*range(min(first, i + 1)), *range(max(i - radius, 0), i + 1)})
        query, keys, values = q[:, i], k[:, held].transpose(1, 2), v[:, held].transpose(1, 2)
        if rotary:
            keys = turn.rotate(keys, torch.arange(len(held)))
            query = turn.rotate(query.unsqueeze(2), torch.tensor([len(held) - 1])).squeeze(2)
        weights = ((keys @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(8)).softmax(-1)
        rows.append((weights.unsqueeze(2) @ values).flatten(1))
    output: Tensor = attention.out_proj(torch.stack(rows, 1))
    return output


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("first", "radius"), [(2, 3), (4, 0), (0, 5), (1, 40), (90, 4)])
@torch.no_grad()
def test_it_is_the_softmax_over_a_cache_numbered_by_places(first: int, radius: int, rotary: bool) -> None:
    positions = "rotary" if rotary else None
    attention, x = make(first_tokens=first, window_radius=radius, positions=positions), tokens(2, 70)
    wanted = cached(attention, x, first, radius, rotary=rotary)
    torch.testing.assert_close(attention(x).output, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("positions", [None, "rotary"])
@torch.no_grad()
def test_a_radius_of_the_whole_length_is_full_attention(positions: str | None) -> None:
    x = tokens(2, 70)
    streaming, full = make(window_radius=69, positions=positions), make(name="full", positions=positions)
    full.load_state_dict(streaming.state_dict())
    torch.testing.assert_close(streaming(x).output, full(x).output)


@pytest.mark.parametrize("positions", [None, "rotary"])
@torch.no_grad()
def test_without_first_tokens_it_is_a_band(positions: str | None) -> None:
    x, options = tokens(2, 200), {"window_radius": 7, "positions": positions}
    streaming, band = make(first_tokens=0, **options), make(name="band", **options)
    band.load_state_dict(streaming.state_dict())
    torch.testing.assert_close(streaming(x).output, band(x).output)


@torch.no_grad()
def test_without_rotary_it_is_a_longformer_of_one_projection() -> None:
    streaming, x = make(first_tokens=3, window_radius=7), tokens(2, 200)
    longformer = make(name="longformer", global_tokens=3, window_radius=7, global_separate_proj=False)
    longformer.load_state_dict(streaming.state_dict())
    torch.testing.assert_close(streaming(x).output, longformer(x).output)
    turned = make(first_tokens=3, window_radius=7, positions="rotary")
    longformer = make(
        name="longformer", global_tokens=3, window_radius=7, global_separate_proj=False, positions="rotary"
    )
    longformer.load_state_dict(turned.state_dict())
    apart = (turned(x).output - longformer(x).output).abs().amax((0, 2))
    assert apart[:11].max() < 1e-10, "up to the capacity of the cache, places are positions"
    assert apart[11:].min() > 1e-6


@torch.no_grad()
def test_a_token_reaches_its_window_and_the_first_reach_all() -> None:
    streaming, x = make(first_tokens=2, window_radius=5), tokens(1, 100)
    for position in (0, 1, 2, 50, 99):
        other = x.clone()
        other[:, position] += 1
        changed = (streaming(other).output - streaming(x).output).abs().amax((0, 2)) > 0
        reach = range(position, 100 if position < 2 else min(position + 6, 100))
        assert changed.nonzero().flatten().tolist() == list(reach)


@pytest.mark.parametrize("positions", [None, "rotary"])
@torch.no_grad()
def test_the_state_stops_growing(positions: str | None) -> None:
    streaming, x = make(first_tokens=2, window_radius=3, positions=positions), tokens(2, 40)
    wanted = streaming(x).output
    with exact_capacity():
        state, _ = streaming.start(2)
        for i in range(40):
            stepped, state = streaming.step(x[:, i : i + 1], state)
            torch.testing.assert_close(stepped.output, wanted[:, i : i + 1])
    assert state["groups"][0]["values"].shape[3] == 6


@torch.no_grad()
def test_the_weights_of_a_step_are_those_of_the_row() -> None:
    streaming, x = make(first_tokens=2, window_radius=3, positions="rotary"), tokens(1, 12)
    state, _ = streaming.start(1)
    for i in range(12):
        stepped, state = streaming.step(x[:, i : i + 1], state, need_weights=True)
    torch.testing.assert_close(stepped.weights[:, :, 0], streaming(x, need_weights=True).weights[:, :, -1])


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"first_tokens": -1}, "first_tokens = -1"),
    ({"window_radius": [2, 4]}, "window_radius"),
    ({"positions": "alibi"}, "it can combine with: rotary"),
    ({"role": "encoder"}, "it can play: decoder"),
)
