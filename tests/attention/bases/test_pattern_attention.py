"""Attention over position patterns, and its groups of heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, reorder
from mtkit.attention.bases.caches import FIRST_CAPACITY
from mtkit.attention.bases.pattern_attention import HeadGroup, PatternAttention, PatternGroup, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band, Blocks, Columns, Comb, Pattern, Rows
from mtkit.attention.kernels.random_pattern import Random, RandomBlocks
from mtkit.attention.kernels.sparse import dense_attend, visible_pairs


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("band", {"window_radius": 20}, 21),
        ("longformer", {"window_radius": 3, "dilation": 4, "global_tokens": 2}, 15),
        ("global", {"global_tokens": 3}, 4),
    ],
)
@torch.no_grad()
def test_a_state_holds_what_can_still_be_seen_and_no_more(name: str, options: dict[str, int], kept: int) -> None:
    attention = build(name, role="decoder", d_model=16, heads=2, **options).eval()
    state, _ = attention.start(2, hypotheses=3)
    for _ in range(50):
        _, state = attention.step(torch.randn(2, 3, 16), state)
    assert state["groups"][0]["keys"].shape[3] == max(kept, FIRST_CAPACITY)


@pytest.mark.parametrize("options", [{"window_radius": 3, "dilation": 4, "global_tokens": 2}, {"window_radius": 5}])
@torch.no_grad()
def test_the_weights_of_a_step_are_those_of_forward(options: dict[str, int]) -> None:
    attention = build("longformer", role="decoder", d_model=16, heads=2, positions="alibi", **options).eval()
    x = torch.randn(1, 40, 16)
    expected = attention(x, need_weights=True)
    state, _ = attention.start(1)
    for t in range(40):
        attended, state = attention.step(x[:, t : t + 1], state, need_weights=True)
        torch.testing.assert_close(attended.weights[:, :, 0], expected.weights[:, :, t, : t + 1])
        torch.testing.assert_close(attended.output[:, 0], expected.output[:, t])


HEADS, LENGTH = 4, 37
SLOTS: list[dict[str, Any]] = [
    {},
    {"positions": "alibi"},
    {"positions": "shaw"},
    {"positions": "rotary"},
    {"projection": {"name": "grouped-query", "kv_heads": 2}},
    {"projection": "multi-query", "positions": "alibi"},
]
dilated = [Band(2, 2, dilation) for dilation in (1, 1, 1, 3)]
strided = [Band(5, 5)] * 2 + [Band(None, None, 6)] * 2
fixed: list[Pattern] = [Blocks(6), Comb(6, 5, 1), Comb(6, 4, 1), Comb(6, 3, 1)]
scales = [Band(width, width) for width in (1, 3, 3, None)]
FAMILIES: dict[str, list[Pattern]] = {
    "dilated": [*dilated],
    "global": [pattern | Columns(2) | Rows(2) for pattern in dilated],
    "strided": [*strided],
    "fixed": fixed,
    "scales": [*scales],
    "random": [Band(1, 1) | Random(2, HEADS, key=7)] * HEADS,
    "random blocks": [Blocks(3) | Columns(3) | RandomBlocks(2, HEADS, 7, block=3, apart=1, first=1)] * HEADS,
    "random blocks and rows": [Columns(6) | Rows(7) | RandomBlocks(2, HEADS, 7, block=3)] * HEADS,
    "random beside blocks": [Blocks(3)] * 2 + [Blocks(3, 1) | RandomBlocks(1, 2, 7, block=3)] * 2,
    "random keys alike": [Blocks(1) | Random(3, 1, key=7)] * HEADS,
    "random beside a band": [Band(4, 4)] * 2 + [Band(0, 0) | Random(2, 2, key=7)] * 2,
}


class ByHead(PatternAttention):
    """A mechanism of one pattern for each head."""

    def __init__(self, site: Site, patterns: list[Pattern]) -> None:
        super().__init__(site)
        self.groups = by_head(patterns)


def make(name: str, role: str = "decoder", **slots: Any) -> ByHead:
    attention = ByHead(Site(role, 32, HEADS, **slots), FAMILIES[name]).double().eval()
    if attention.positions is not None:
        for parameter in attention.positions.parameters():
            torch.nn.init.normal_(parameter)
    return attention


def gradients(attention: ByHead, output: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((output * weight).sum(), [x, *attention.parameters()], retain_graph=True)


@pytest.mark.parametrize(
    ("name", "role"),
    # without lengths random keys are drawn from those before the query
    [(name, role) for name in FAMILIES for role in ("encoder", "decoder") if role == "decoder" or "random" not in name],
)
def test_each_head_sees_its_own_keys(name: str, role: str) -> None:
    """Forward, backward and weights against a dense mask for each head, with padding."""
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]])
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64, requires_grad=True)
    for slots in SLOTS:
        attention = make(name, role, **slots)
        ours, naive = attention(x, query_valid=valid), attention.naive(x, query_valid=valid)
        weight = torch.randn_like(ours.output) * valid.unsqueeze(-1)
        torch.testing.assert_close(ours.output * weight, naive.output * weight)
        for one, other in zip(*(gradients(attention, each.output, x, weight) for each in (ours, naive)), strict=True):
            torch.testing.assert_close(one, other)
        weighing = attention(x, query_valid=valid, need_weights=True)
        torch.testing.assert_close(weighing.output * weight, ours.output * weight)
        torch.testing.assert_close(weighing.weights, naive.weights)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_each_head_of_a_step_sees_its_own_keys(name: str) -> None:
    """Steps, with hypotheses that change places, against the whole sequence."""
    x = torch.randn(6, LENGTH, 32, dtype=torch.float64)
    for slots in SLOTS:
        attention = make(name, **slots)
        state, _ = attention.start(2, hypotheses=3)
        expected, rows = attention(x, need_weights=True), torch.arange(6)
        for t in range(LENGTH):
            need_weights = t % 2 == 0
            attended, state = attention.step(x[rows, t].unflatten(0, (2, 3)), state, need_weights=need_weights)
            torch.testing.assert_close(attended.output.flatten(0, 1), expected.output[rows, t])
            if need_weights:
                weights = attended.weights.transpose(1, 2).flatten(0, 1)
                torch.testing.assert_close(weights, expected.weights[rows, :, t, : t + 1])
            if t == 11:
                state = reorder(state, torch.tensor([[2, 0, 1], [1, 2, 0]]))
                rows = rows[[2, 0, 1, 4, 5, 3]]


@torch.no_grad()
def test_each_group_keeps_what_its_heads_can_still_see() -> None:
    attention = make("dilated")
    state, _ = attention.start(1)
    for _ in range(LENGTH):
        _, state = attention.step(torch.randn(1, 1, 32, dtype=torch.float64), state)
    assert [group["keys"].shape[2:4] for group in state["groups"]] == [(3, 8), (1, 8)]
    attention = make("strided")
    state, _ = attention.start(1)
    for _ in range(LENGTH):
        _, state = attention.step(torch.randn(1, 1, 32, dtype=torch.float64), state)
    near, far = state["groups"]
    assert near["keys"].shape[3] == 8
    assert far["keys"].shape[3] >= LENGTH


def test_neighbours_of_equal_patterns_are_one_group() -> None:
    groups = by_head([Band(1, 1), Band(1, 1), Columns(2), Band(1, 1)])
    assert [(group.some, group.pattern) for group in groups] == [
        (range(2), Band(1, 1)),
        (range(2, 3), Columns(2)),
        (range(3, 4), Band(1, 1)),
    ]


@pytest.mark.parametrize(
    ("some", "shared", "rows"),
    [
        (range(2, 6), 8, [2, 3, 4, 5]),
        (range(2, 6), 4, [1, 2]),
        (range(2, 6), 2, [0, 0, 1, 1]),
        (range(4, 6), 2, [1]),
        (range(2, 6), 1, [0]),
    ],
)
def test_a_group_reads_the_rows_that_its_heads_share(some: range, shared: int, rows: list[int]) -> None:
    group = HeadGroup(some, 8)
    assert list(group.rows(shared)) == rows
    x = torch.randn(2, shared, 3)
    assert torch.equal(group.of(x)[0], x[:, rows])
    assert torch.equal(group.of(x.unsqueeze(1), axis=2)[0], x[:, None, rows])
    own = group.of(x)[0].repeat_interleave(len(some) // len(rows), 1)
    assert torch.equal(own, x.repeat_interleave(8 // shared, 1)[:, some.start : some.stop])


@torch.no_grad()
def test_groups_may_have_widths_of_their_own() -> None:
    """Two heads over all keys at rank 3, and two over a window at width 8: steps against dense masks."""
    far, near = PatternGroup(range(2), HEADS, Band(None, None)), PatternGroup(range(2, 4), HEADS, Band(2, 2))
    at = torch.arange(LENGTH)
    for group, width in ((far, 3), (near, 8)):
        q, k = (torch.randn(1, 2, LENGTH, width, dtype=torch.float64) for _ in range(2))
        v = torch.randn(1, 2, LENGTH, 5, dtype=torch.float64)
        scale = width**-0.5
        visible = visible_pairs(group.pattern.sees(at.unsqueeze(-1), at), True, None)
        wanted, _ = dense_attend(q, k, v, visible, scale)
        torch.testing.assert_close(group.attend(q, k, v, scale=scale, causal=True)[0], wanted)
        state = group.start(1, 1, q, keys=(HEADS, width), values=(HEADS, 5))
        for t in range(LENGTH):
            token = (x[:, None, :, t] for x in (q, k, v))
            heads, _, state = group.step(state, *token, scale=scale)
            torch.testing.assert_close(heads[:, 0], wanted[:, :, t])
        heads, kept, own = state["keys"].shape[2:]
        assert (heads, own) == (2, width)
        assert kept == 8 if group is near else kept >= LENGTH
