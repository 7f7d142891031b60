"""Guided attention: the closed forms of its loss, which rows count, its schedule, and that nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.contract import Inputs, Site
from mtkit.attention.heads.guided import Guided
from mtkit.attention.marks import marks_from
from mtkit.attention.slots import HeadResults
from tests.attention.small import refusals
from tests.contract.counting import Count

VALID = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
AROUND: dict[str, dict[str, Any]] = {
    "full": {},
    "realformer": {},
    "band": {"window_radius": 2},
    "longformer": {"window_radius": 2, "global_tokens": 1},
}


def make(role: str = "encoder", name: str = "guided", **arguments: Any) -> Any:
    return build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).train()


def loss(patterns: str, weights: Tensor, valid: Tensor | None = None, visible: Tensor | None = None, **how: Any) -> Any:
    """Of weights (B, H, T, T) alone, summed over keys, at weight 1."""
    guided = Guided(Site("encoder", 32, 4), patterns=patterns, **{"weight": 1.0, "reduction": "row"} | how)
    nothing = torch.full((2, 4, 6, 8), float("nan"))
    inputs = Inputs(torch.zeros(2, 6, 32), query_valid=valid)
    return guided(HeadResults(inputs, nothing, nothing, weights, visible))["guided"]


def pointing(offset: int | None, length: int = 6) -> Tensor:
    """All weight (2, 4, T, T) on the key at a distance, or on the first one."""
    at = torch.zeros(length, dtype=torch.long) if offset is None else torch.arange(length) + offset
    return torch.nn.functional.one_hot(at % length, length).float().expand(2, 4, -1, -1)


@pytest.mark.parametrize(("name", "offset"), [("self", 0), ("next", 1), ("prev", -1), ("first", None)])
def test_a_head_that_follows_its_pattern_loses_nothing_and_one_on_wrong_keys_two(name: str, offset: int | None) -> None:
    assert loss(f"{name}:4", pointing(offset)) == pytest.approx(0.0, abs=1e-6)
    assert loss(f"{name}:4", pointing(3 if offset is not None else -1)) == pytest.approx(
        2.0 if offset is not None else 10 / 6
    )
    assert loss(f"{name}:4", pointing(offset), VALID) == pytest.approx(0.0, abs=1e-6)


def test_the_loss_is_the_squared_distance_to_the_patterns_matrix() -> None:
    """Against P written out: rows without a target or of padding left out, keys of the segment counted alone."""
    weights = torch.randn(2, 4, 6, 6).masked_fill(~VALID[:, None, None], -1e9).softmax(-1)
    rows, cells = [], []
    for b, length in enumerate((6, 3)):
        for i in range(length - 1):  # the last has no next one
            target = torch.zeros(6)
            target[i + 1] = 1
            for head in (1, 2):
                rows.append((weights[b, head, i] - target).square().sum())
                cells.append(rows[-1] / length)
    first = torch.stack(
        [(weights[b, 0, i, 0] - 1) ** 2 + weights[b, 0, i, 1:].square().sum() for b, i in VALID.nonzero()]
    )
    expected = torch.stack(rows).mean() + first.mean()
    torch.testing.assert_close(loss("first:1,next:2", weights, VALID), expected)
    only_next = loss("next:2", weights[:, 1:3], VALID, reduction="mse")
    torch.testing.assert_close(only_next, torch.stack(cells).mean())


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("reduction", ["row", "mse"])
def test_separators_that_a_row_sees_share_its_weight(role: str, reduction: str) -> None:
    """Against targets written out: rows that see no separator left out, as are padding's separators."""
    weights, breaks = torch.rand(2, 4, 6, 6).softmax(-1), [{2, 4}, {0, 1, 4}]
    marks = marks_from(torch.tensor([[j in row for j in range(6)] for row in breaks]))
    near = (torch.arange(6).unsqueeze(1) - torch.arange(6)).abs() <= 1
    guided = Guided(Site(role, 32, 4), patterns="self:1,separator:2", weight=1.0, reduction=reduction)
    assert guided.reads_marks
    rows = []
    for b, length in enumerate((6, 3)):
        for i in range(length):
            last = i if role == "decoder" else length - 1
            seen = [j for j in breaks[b] if j <= last and j < length and abs(i - j) <= 1]
            target = torch.tensor([j in seen for j in range(6)]).float() / max(len(seen), 1)
            distances = (weights[b, 1:3, i] - target).square().sum(-1) / (1 if reduction == "row" else length)
            rows += distances.tolist() if seen else []
    assert 0 < len(rows) < 18
    alone = Guided(Site(role, 32, 4), patterns="self:1", weight=1.0, reduction=reduction)
    heads = torch.zeros(2, 4, 6, 8)
    inputs = Inputs(torch.zeros(2, 6, 32), query_valid=VALID)
    results = HeadResults(inputs, heads, heads, weights, near)
    others = alone(results)["guided"]
    marked = guided(results._replace(inputs=replace(inputs, query_marks=marks)))["guided"]
    torch.testing.assert_close(marked, others + sum(rows) / len(rows))
    torch.testing.assert_close(guided(results)["guided"], others)


def test_rows_whose_target_is_not_shown_count_nowhere() -> None:
    weights = torch.rand(2, 4, 6, 6).softmax(-1)
    near = (torch.arange(6).unsqueeze(1) - torch.arange(6)).abs() <= 2
    expected = loss("first:1", weights[:, :, :3])  # the window of only three tokens holds the first
    torch.testing.assert_close(loss("first:1", weights, visible=near), expected)
    assert loss("prev:1", weights, visible=torch.eye(6, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("name", "options", "patterns"),
    [
        ("band", {"window_radius": 2}, "first:4"),
        ("low-rank-band", {"band": 2}, "first:4"),
        ("low-rank-band", {"band": 2, "band_heads": 4}, "first:2"),
        ("nadaraya-watson", {"exclude_self": True}, "self:1,next:1"),
        ("bigbird", {"bigbird_form": "etc", "block_size": 3, "bigbird_window": 1, "bigbird_random": 0}, "first:2"),
    ],
)
def test_rows_whose_target_a_mechanism_hides_count_nowhere(name: str, options: dict[str, Any], patterns: str) -> None:
    regularizer = {"name": "guided", "patterns": patterns, "weight": 1.0, "reduction": "row"}
    attention = make(name=name, regularizer=regularizer, **options)
    x, valid = torch.randn(2, 9, 32), torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    attended = attention(x, query_valid=valid, need_weights=True)
    shown = attended.weights[:, : attention.regularizer.guided] > 0
    expected = loss(patterns, attended.weights, valid, shown)
    assert expected < loss(patterns, attended.weights, valid) - 0.01
    torch.testing.assert_close(attended.losses["guided"], expected)
    torch.testing.assert_close(attention(x, query_valid=valid).losses["guided"], expected)


@pytest.mark.parametrize("patterns", ["self:1", "first:1", "next:1", "prev:1"])
def test_a_single_token_gives_nothing(patterns: str) -> None:
    assert make(patterns=patterns)(torch.randn(2, 1, 32)).losses["guided"] == 0


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_outputs_are_those_without_it_and_the_loss_is_of_training(name: str, role: str) -> None:
    plain = make(role, name, **AROUND[name])
    guided = make(role, name, regularizer={"name": "guided", "patterns": "prev:2"}, **AROUND[name])
    guided.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 6, 32)
    wanted, got = (each(x, query_valid=VALID) for each in (plain, guided))
    torch.testing.assert_close(got.output, wanted.output, rtol=1e-5, atol=1e-6)
    assert set(got.losses) == {"guided"}
    assert not wanted.losses
    assert not guided.eval()(x).losses


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("positions", [None, "alibi"])
@pytest.mark.parametrize("projection", [None, "grouped-query", "multi-query"])
def test_the_loss_is_that_of_the_weights_which_the_mechanism_returns(
    name: str, role: str, positions: str | None, projection: str | None
) -> None:
    """Only the guided heads' weights are computed, by other ways than those returned."""
    slots = {"positions": positions, "projection": projection}
    regularizer = {"name": "guided", "patterns": "prev:2,self:1", "weight": 1.0, "reduction": "row"}
    attention = make(role, name, regularizer=regularizer, **slots, **AROUND[name])
    x = torch.randn(2, 6, 32)
    attended = attention(x, query_valid=VALID, need_weights=True)
    torch.testing.assert_close(attended.losses["guided"], loss("prev:2,self:1", attended.weights, VALID))
    apart = attention(x, query_valid=VALID)
    assert apart.weights is None
    torch.testing.assert_close(apart.losses["guided"], attended.losses["guided"])


@pytest.mark.parametrize("name", ["full", "band", "longformer"])
def test_only_the_weights_of_guided_heads_are_computed(name: str) -> None:
    attention = make(name=name, regularizer={"name": "guided", "patterns": "prev:1"}, **AROUND[name])
    with Count() as counted:
        attention(torch.randn(1, 90, 32))
    pairs = [shape for shape in counted.shapes if len(shape) == 4 and shape[2:] == (90, 90)]
    assert {shape[1] for shape in pairs} == {1}


def test_padding_counts_nowhere() -> None:
    attention, x = make(), torch.randn(2, 6, 32)
    before = attention(x, query_valid=VALID).losses["guided"]
    x = x.masked_fill(~VALID.unsqueeze(-1), 9.0)
    torch.testing.assert_close(attention(x, query_valid=VALID).losses["guided"], before)
    longer, valid = torch.cat([x, torch.randn(2, 5, 32)], 1), torch.cat([VALID, torch.zeros(2, 5).bool()], 1)
    torch.testing.assert_close(attention(longer, query_valid=valid).losses["guided"], before)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_descending_the_loss_makes_the_heads_follow_the_patterns(role: str) -> None:
    attention = make(role, d_model=32, heads=4, reduction="row", weight=1.0)
    x = torch.nn.functional.one_hot(torch.arange(6), 32).float().expand(1, -1, -1) * 4  # each token names its place
    descent = torch.optim.Adam(attention.parameters(), lr=0.05)
    for _ in range(60):
        loss = attention(x).losses["guided"]
        descent.zero_grad()
        loss.backward()
        descent.step()
    weights = attention(x, need_weights=True).weights[0]
    prev, first = (1, 2) if role == "encoder" else (0, 1)
    assert weights[prev].diagonal(-1).min() > 0.8
    assert weights[first, :, 0].min() > 0.8
    if role == "encoder":
        assert weights[0].diagonal(1).min() > 0.8


def test_the_weight_is_held_and_then_falls_to_nothing_at_the_end() -> None:
    attention, x = make(hold=20), torch.randn(2, 6, 32)
    full = attention(x).losses["guided"]
    for update, factor in ((1, 1.0), (20, 1.0), (60, 0.5), (80, 0.25), (100, 0.0)):
        attention.after_update(update, 100)
        torch.testing.assert_close(attention(x).losses["guided"], factor * full)
    attention.after_update(60, 100)
    resumed = make(hold=20)
    resumed.load_state_dict(attention.state_dict())
    torch.testing.assert_close(resumed(x).losses["guided"], 0.5 * full)
    for other in (make(hold=20, decay="none"), make(hold=200)):
        other.load_state_dict(attention.state_dict())
        other.after_update(80, 100)
        torch.testing.assert_close(other(x).losses["guided"], full)


def test_without_weight_no_attention_weights_are_computed() -> None:
    attention = make(weight=0.0)
    with Count() as counted:
        assert not attention(torch.randn(1, 90, 32)).losses
    assert not any(shape[-2:] == (90, 90) for shape in counted.shapes)


test_what_cannot_be_guided_is_refused = refusals(
    make,
    ({"patterns": "nxt:1"}, "must be counts of self, next, prev, first.*did you mean 'next'"),
    ({"patterns": "next"}, "must be counts of"),
    ({"patterns": "next:0"}, "must be counts of"),
    ({"patterns": "prev:1,prev:2"}, "must be counts of"),
    ({"patterns": "prev:3,first:2"}, "guide at most all 4 heads"),
    ({"role": "decoder", "patterns": "next:1"}, "no head to the next token in the decoder role"),
    ({"role": "cross"}, "it can play: encoder, decoder"),
    ({"role": "cross", "name": "full", "regularizer": "guided"}, "it can play: encoder, decoder"),
    ({"name": "linear", "regularizer": "guided"}, "cannot combine with regularizer=guided"),
    ({"name": "axial", "regularizer": "guided"}, "cannot combine with regularizer=guided"),
)


def test_defaults_guide_one_head_each_as_far_as_there_are_heads() -> None:
    assert make().regularizer.guides == {"next": 1, "prev": 1, "first": 1}
    assert make("decoder").regularizer.guides == {"prev": 1, "first": 1}
    assert make(heads=2).regularizer.guides == {"next": 1, "prev": 1}
