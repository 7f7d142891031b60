"""Sums over a prefix in two parts, the latest rows and the sums of earlier ones, against the recurrence itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtkit.attention.bases import recent_sums
from mtkit.attention.bases.recent_sums import SHARING, add_recent, corrected_next, fade, read_recent, start_recent
from mtkit.attention.contract import State
from mtkit.attention.states import reorder
from mtkit.memory import held_bytes

GROUPS, FEATURES, WIDTH = 2, 12, 20
BLOCK = FEATURES * WIDTH // (FEATURES + WIDTH)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def start(segments: int, hypotheses: int, fading: bool = False) -> State:
    like = torch.zeros(1, dtype=torch.float64)
    return start_recent(segments, hypotheses, like, groups=GROUPS, features=FEATURES, width=WIDTH, fading=fading)


def moved(step: int, hypotheses: int, segments: int) -> Tensor | None:
    """What beam search does after a step: every segment in a way of its own, sometimes nothing."""
    if step % 4 == 3:
        return None
    if step == 17:
        return torch.arange(segments).flip(0)[:2]
    return torch.randint(hypotheses, (segments, hypotheses if step > 1 else 3))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fading", [False, True])
@pytest.mark.parametrize("first", [1, 3, SHARING + 4])
def test_reads_are_those_of_the_recurrence_whatever_moves(first: int, fading: bool, scaled: bool) -> None:
    torch.manual_seed(first)
    segments, hypotheses, offset = 3, first, 800.0 if scaled else 0.0  # exp(800) is infinite
    state, sums = start(segments, hypotheses, fading or scaled), torch.zeros(3, first, GROUPS, FEATURES, WIDTH).double()
    folds = 0
    for step in range(5 * BLOCK):
        k, v, q = (drawn(segments, GROUPS, *size) for size in
                   ((hypotheses, FEATURES), (hypotheses, WIDTH), (2, hypotheses, FEATURES)))  # fmt: skip
        v[..., -1] = 1.0
        k, q = k.abs(), q.abs()
        scale = 3 * drawn(segments, GROUPS, hypotheses, 1) if scaled else None
        if fading:
            kept = -drawn(segments, GROUPS, hypotheses, 1).abs()
            kept[step % segments] -= 50.0 * (step % 5 == 0)
            state, sums = fade(state, kept), sums * kept.exp().transpose(1, 2).unsqueeze(-1)
        state = add_recent(state, k, v, None if scale is None else scale + offset)
        added = torch.einsum("bgnm,bgnv->bngmv", k if scale is None else k * scale.exp(), v)
        sums, folds = sums + added, folds + (state["count"] == 1)
        read, expected = read_recent(state, q, scaled=scaled), torch.einsum("bgrnm,bngmv->bgrnv", q, sums)
        if scaled:
            read, expected = read / read[..., -1:], expected / expected[..., -1:]
        torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-12)
        index = moved(step, hypotheses, segments)
        if index is not None:
            state, sums = reorder(state, index), reorder({"sums": sums}, index)["sums"]
            segments, hypotheses = sums.shape[:2]
    assert folds >= 4


@pytest.mark.parametrize("hypotheses", [1, 3])
def test_corrections_are_the_delta_rule(hypotheses: int) -> None:
    state, sums = start(3, hypotheses), torch.zeros(3, hypotheses, GROUPS, FEATURES, WIDTH).double()
    for _ in range(3 * BLOCK):
        shape = 3, GROUPS, hypotheses
        k, v, beta = drawn(*shape, FEATURES) / 4, drawn(*shape, WIDTH), drawn(*shape, 1).sigmoid()
        q = drawn(3, GROUPS, 2, hypotheses, FEATURES)
        read, state = corrected_next(q, k, v, beta, state)
        held = torch.einsum("bgnm,bngmv->bgnv", k, sums)
        sums = sums + torch.einsum("bgnm,bgnv->bngmv", k, beta * (v - held))
        torch.testing.assert_close(read, torch.einsum("bgrnm,bngmv->bgrnv", q, sums))
        index = torch.randint(hypotheses, (3, hypotheses))
        state, sums = reorder(state, index), reorder({"sums": sums}, index)["sums"]


@pytest.mark.parametrize("fading", [False, True])
def test_a_hypothesis_without_numbers_leaves_the_others_alone(fading: bool) -> None:
    torch.manual_seed(5)
    states: list[Any] = [start(2, 3, fading), start(2, 3, fading)]
    for step in range(2 * BLOCK):
        k, v, q = drawn(2, GROUPS, 3, FEATURES), drawn(2, GROUPS, 3, WIDTH), drawn(2, GROUPS, 1, 3, FEATURES)
        reads = []
        for place, broken in enumerate((False, True)):
            keys, values = k.clone(), v.clone()
            if broken and step == 2:
                keys[0, :, 1], values[0, :, 1] = torch.nan, torch.nan
            states[place] = add_recent(states[place], keys, values)
            reads.append(read_recent(states[place], q))
        torch.testing.assert_close(reads[0][:, :, :, [0, 2]], reads[1][:, :, :, [0, 2]])
        assert reads[1][0, :, :, 1].isnan().any() == (step >= 2)


@torch.inference_mode()
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("hypotheses", [1, 3])
def test_the_loop_reads_the_rows_that_a_hypothesis_sees(hypotheses: int, scaled: bool) -> None:
    """In float32; in float64 products read all rows."""
    torch.manual_seed(6)
    exact = start(2, hypotheses, scaled)
    state = start_recent(2, hypotheses, torch.zeros(1), groups=GROUPS, features=FEATURES, width=WIDTH, fading=scaled)
    for _ in range(2 * BLOCK):
        shape = 2, GROUPS, hypotheses
        k, v, q = drawn(*shape, FEATURES), drawn(*shape, WIDTH), drawn(2, GROUPS, 2, hypotheses, FEATURES)
        scale = 3 * drawn(*shape, 1) if scaled else None
        exact = add_recent(exact, k, v, scale)
        state = add_recent(state, k.float(), v.float(), None if scale is None else scale.float())
        read = read_recent(state, q.float(), scaled=scaled).double()
        torch.testing.assert_close(read, read_recent(exact, q, scaled=scaled), rtol=1e-4, atol=1e-4)
        index = torch.randint(hypotheses, (2, hypotheses))
        exact, state = (reorder(x, index) for x in (exact, state))


@torch.inference_mode()
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("by_loop", [False, True])
def test_rows_in_bfloat16_are_summed_in_float32(by_loop: bool, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_sums, "cached_is_faster", lambda *_: by_loop)
    torch.manual_seed(7)
    exact, like = start(2, 3, scaled), torch.zeros(1, dtype=torch.bfloat16)
    state = start_recent(2, 3, like, groups=GROUPS, features=FEATURES, width=WIDTH, fading=scaled)
    for _ in range(2 * BLOCK + 1):
        shape = 2, GROUPS, 3
        k, v, q = drawn(*shape, FEATURES).abs(), drawn(*shape, WIDTH), drawn(2, GROUPS, 2, 3, FEATURES).abs()
        scale = drawn(*shape, 1) if scaled else None
        exact = add_recent(exact, k, v, scale)
        state = add_recent(state, k.float(), v.float(), None if scale is None else scale.float())
        read, expected = read_recent(state, q.float(), scaled=scaled), read_recent(exact, q, scaled=scaled)
        assert read.dtype == torch.float32
        assert (read - expected).norm() < 0.01 * expected.norm()
    assert state["past"]["shared"]["sums"].dtype == torch.float32


def test_a_block_of_steps_costs_and_keeps_the_same_at_any_position() -> None:
    state, costs = start(2, 3), []
    for _ in range(12):
        with FlopCounterMode(display=False) as counter:
            for _ in range(BLOCK):
                state = add_recent(state, drawn(2, GROUPS, 3, FEATURES), drawn(2, GROUPS, 3, WIDTH))
                read_recent(state, drawn(2, GROUPS, 2, 3, FEATURES))
        costs.append((counter.get_total_flops(), held_bytes(state)))
    assert costs[1] > costs[0], "the first block has no sums yet"
    assert len(set(costs[2:])) == 1
