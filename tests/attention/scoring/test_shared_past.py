"""Rows of a segment's hypotheses, written once: each hypothesis sees those of its own past, whatever reorder does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, reorder
from mtkit.attention.scoring._shared_past import MOST


def make(**arguments: Any) -> Any:
    return build("full", role="decoder", d_model=32, heads=4, **arguments).eval()


def walked(full: Any, x: Tensor, parents: list[Tensor]) -> tuple[Any, Any, Tensor]:
    """The last `newest`, its state and the tokens (B, N, t, D) behind each hypothesis; parents between the steps."""
    state, _ = full.start(len(x), hypotheses=x.shape[1])
    past = x[:, :, :0]
    for t in range(x.shape[2]):
        if t and len(parents) >= t:
            state = reorder(state, parents[t - 1])
            past = past.gather(1, parents[t - 1][:, :, None, None].expand(-1, -1, *past.shape[2:]))
        token = x[:, : past.shape[1], t]
        newest, state = full.newest(token, state)
        past = torch.cat([past, token[:, :, None]], 2)
    return newest, state, past


@pytest.mark.parametrize("steps", [5, 40, 90])
@torch.no_grad()
def test_what_a_hypothesis_sees_is_its_own_past(steps: int) -> None:
    """Forty steps of three hypotheses are more rows than there is room for at first."""
    full, x = make(positions="rotary", projection="multi-query"), torch.randn(2, 3, steps, 32)
    parents = [torch.randint(3, (2, 3)) for _ in range(steps - 1)]
    newest, _, past = walked(full, x, parents)
    keys, values = full.keys_values(past.flatten(0, 1))  # (B * N, 1, T, K)
    for number in range(6):
        segment, hypothesis = divmod(number, 3)
        mine = newest.visible[segment, 0, hypothesis]
        torch.testing.assert_close(newest.keys[segment, :, mine], keys[number])
        torch.testing.assert_close(newest.values[segment, :, mine], values[number])
        assert newest.key_position[mine].tolist() == list(range(steps))
    assert newest.query_position.tolist() == [steps - 1]


@torch.no_grad()
def test_reorder_moves_no_keys() -> None:
    full = make()
    state, _ = full.start(2, hypotheses=3)
    _, state = full.step(torch.randn(2, 3, 32), state)
    after = reorder(state, torch.tensor([[2, 2, 0], [0, 1, 1]]))
    assert after["shared"]["keys"] is state["shared"]["keys"]
    assert after["shared"]["values"] is state["shared"]["values"]


@torch.no_grad()
def test_one_hypothesis_needs_no_mask_until_it_branches() -> None:
    full, x = make(), torch.randn(2, 1, 4, 32)
    newest, state, _ = walked(full, x, [])
    assert newest.visible is None
    state = reorder(state, torch.zeros(2, 3, dtype=torch.long))
    newest, state = full.newest(torch.randn(2, 3, 32), state)
    assert newest.visible is not None
    assert newest.visible.sum(-1).unique().tolist() == [5]
    newest, _ = full.newest(torch.randn(2, 1, 32), reorder(state, torch.ones(2, 1, dtype=torch.long)))
    assert newest.visible is not None
    assert newest.visible.sum(-1).unique().tolist() == [6]


@pytest.mark.parametrize("steps", [5, 70])
@pytest.mark.parametrize("positions", [None, "alibi", "shaw"])
@torch.no_grad()
def test_weights_are_by_position(positions: str | None, steps: int) -> None:
    full, x = make(**({"positions": positions} if positions else {})), torch.randn(2, 3, steps + 1, 32)
    _, state, past = walked(full, x[:, :, :steps], [torch.randint(3, (2, 3)) for _ in range(steps - 1)])
    assert (state["rows"] < 3 * steps) == (steps == 70)  # what nobody sees has been let go of
    attended, _ = full.step(x[:, :, steps], state, need_weights=True)
    whole = torch.cat([past, x[:, :, steps:]], 2).flatten(0, 1)
    expected = full(whole, need_weights=True).weights[:, :, -1].unflatten(0, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(attended.weights, expected)


@torch.no_grad()
def test_rows_that_nobody_sees_are_let_go_of() -> None:
    """All hypotheses but those of the last steps descend from one, in one segment from another than in the other."""
    full, x = make(), torch.randn(2, 4, 200, 32)
    parents = [torch.tensor([[1] * 4, [3] * 4]) if t % 5 == 0 else torch.arange(4).expand(2, 4) for t in range(199)]
    _, state, _ = walked(full, x, parents)
    assert state["count"] == 200
    assert state["rows"] < 1.6 * 200
    assert state["seen"].shape[2] < 2 * 200
    assert state["shared"]["position"][0, :100].tolist() == list(range(100))


@torch.no_grad()
def test_all_segments_may_leave() -> None:
    full = make(positions="alibi")
    for steps in (3, 10):  # ten steps of three hypotheses leave no room for another
        _, state, _ = walked(full, torch.randn(2, 3, steps, 32), [])
        attended, _ = full.step(torch.randn(0, 3, 32), reorder(state, torch.zeros(0, dtype=torch.long)))
        assert attended.output.shape == (0, 3, 32)


@torch.no_grad()
def test_a_hypothesis_without_numbers_leaves_the_others_alone() -> None:
    full, x = make(), torch.randn(2, 3, 6, 32)
    x[0, 1, 2:4] = torch.nan
    x[1, 0, 3] = torch.inf
    state, _ = full.start(2, hypotheses=3)
    whole = full(x.flatten(0, 1)).output.unflatten(0, (2, 3))
    for t in range(6):
        attended, state = full.step(x[:, :, t], state)
        for segment, hypothesis in ((0, 0), (0, 2), (1, 1), (1, 2)):
            torch.testing.assert_close(attended.output[segment, hypothesis], whole[segment, hypothesis, t])
        assert t != 3 or attended.output[0, 1].isnan().all()


@torch.no_grad()
def test_values_that_overflow_are_no_numbers_for_those_who_see_them() -> None:
    full, x = make(), torch.randn(1, 3, 4, 32)
    for projection in (full.q_proj, full.k_proj):  # else keys would overflow too, and hide what is asked for
        projection.weight.zero_()
    full.v_proj.weight.mul_(1e15)
    x[0, 1, 1] *= 1e30
    state, _ = full.start(1, hypotheses=3)
    for t in range(4):
        attended, state = full.step(x[:, :, t], state)
        assert attended.output[0, [0, 2]].isfinite().all()
        assert attended.output[0, 1].isfinite().all() == (t < 1)


@torch.no_grad()
def test_many_draws_have_caches_of_their_own() -> None:
    """Else each would look at the rows of all."""
    full, x = make(), torch.randn(1, MOST + 1, 4, 32)
    state, _ = full.start(1, hypotheses=MOST + 1)
    for t in range(4):
        attended, state = full.step(x[:, :, t], state, need_weights=True)
    assert "seen" not in state
    whole = full(x[0], need_weights=True)
    torch.testing.assert_close(attended.output[0], whole.output[:, -1])
    torch.testing.assert_close(attended.weights[0].transpose(0, 1), whole.weights[:, :, -1])


@torch.no_grad()
def test_many_that_branch_off_from_one_go_on_from_its_past() -> None:
    full, x = make(positions="rotary"), torch.randn(2, MOST + 1, 4, 32)
    x[:, 1:, :2] = x[:, :1, :2]  # the past of the one
    state, _ = full.start(2, hypotheses=1)
    for t in range(4):
        if t == 2:
            state = reorder(state, torch.zeros(2, MOST + 1, dtype=torch.long))
        attended, state = full.step(x[:, : 1 if t < 2 else None, t], state)
    whole = full(x.flatten(0, 1)).output[:, -1].unflatten(0, x.shape[:2])
    torch.testing.assert_close(attended.output, whole)
