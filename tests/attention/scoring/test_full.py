"""Full attention: the definition that every other mechanism's limit is measured by."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, reorder
from mtkit.attention.bases.product_attention import MAX_SHARING
from mtkit.attention.kernels.dot_product import attend
from tests.attention.small import maker

make = maker("full")


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_it_is_pytorchs_own_multi_head_attention(role: str) -> None:
    full, x = make(role), torch.randn(2, 7, 32)
    other = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    other.in_proj_weight = torch.nn.Parameter(torch.cat([p.weight for p in (full.q_proj, full.k_proj, full.v_proj)]))
    other.out_proj.weight = full.out_proj.weight
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if role == "decoder" else None
    wanted, weights = other(x, x, x, attn_mask=hidden, average_attn_weights=False)
    attended = full(x, need_weights=True)
    torch.testing.assert_close(attended.output, wanted)
    torch.testing.assert_close(attended.weights, weights)
    torch.testing.assert_close(full(x).output, wanted)


def test_a_memory_of_another_width_is_read() -> None:
    full = make("cross", memory_width=12)
    assert full(torch.randn(2, 3, 32), torch.randn(2, 9, 12)).output.shape == (2, 3, 32)


def test_one_key_is_its_value() -> None:
    full, x = make("decoder"), torch.randn(2, 5, 32)
    torch.testing.assert_close(full(x).output[:, 0], full.out_proj(full.v_proj(x[:, 0])))


def test_weights_are_given_when_asked_for() -> None:
    full, x, memory = make("cross"), torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    assert full(x, memory).weights is None
    weights = full(x, memory, memory_valid=valid, need_weights=True).weights
    assert weights.shape == (2, 4, 3, 5)
    assert not weights[1, :, :, 2:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    state, _ = full.start(2, memory, valid, hypotheses=3)
    torch.testing.assert_close(full.step(x, state, need_weights=True)[0].weights, weights)


def test_dropout_is_of_weights_and_only_in_training() -> None:
    full, x = make(dropout=0.5), torch.randn(2, 7, 32)
    assert torch.equal(full(x).output, full(x).output)
    full.train()
    assert not torch.equal(full(x).output, full(x).output)


def test_fused_and_explicit_attention_agree_in_float64() -> None:
    qkv = [torch.randn(2, 4, 33, 8, dtype=torch.float64) for _ in range(3)]
    for causal in (True, False):
        fused, explicit = (attend(*qkv, scale=0.3, causal=causal, need_weights=need)[0] for need in (False, True))
        torch.testing.assert_close(fused, explicit, rtol=1e-12, atol=1e-12)


def make_decoder(**arguments: Any) -> Any:
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
    full, x = make_decoder(positions="rotary", projection="multi-query"), torch.randn(2, 3, steps, 32)
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
    full = make_decoder()
    state, _ = full.start(2, hypotheses=3)
    _, state = full.step(torch.randn(2, 3, 32), state)
    after = reorder(state, torch.tensor([[2, 2, 0], [0, 1, 1]]))
    assert after["shared"]["keys"] is state["shared"]["keys"]
    assert after["shared"]["values"] is state["shared"]["values"]


@torch.no_grad()
def test_one_hypothesis_needs_no_mask_until_it_branches() -> None:
    full, x = make_decoder(), torch.randn(2, 1, 4, 32)
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
    full, x = make_decoder(**({"positions": positions} if positions else {})), torch.randn(2, 3, steps + 1, 32)
    _, state, past = walked(full, x[:, :, :steps], [torch.randint(3, (2, 3)) for _ in range(steps - 1)])
    assert (state["rows"] < 3 * steps) == (steps == 70)  # what nobody sees has been let go of
    attended, _ = full.step(x[:, :, steps], state, need_weights=True)
    whole = torch.cat([past, x[:, :, steps:]], 2).flatten(0, 1)
    expected = full(whole, need_weights=True).weights[:, :, -1].unflatten(0, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(attended.weights, expected)


@torch.no_grad()
def test_rows_that_nobody_sees_are_let_go_of() -> None:
    """All hypotheses but those of the last steps descend from one, in one segment from another than in the other."""
    full, x = make_decoder(), torch.randn(2, 4, 200, 32)
    parents = [torch.tensor([[1] * 4, [3] * 4]) if t % 5 == 0 else torch.arange(4).expand(2, 4) for t in range(199)]
    _, state, _ = walked(full, x, parents)
    assert state["count"] == 200
    assert state["rows"] < 1.6 * 200
    assert state["seen"].shape[2] < 2 * 200
    assert state["shared"]["position"][0, :100].tolist() == list(range(100))


@torch.no_grad()
def test_all_segments_may_leave() -> None:
    full = make_decoder(positions="alibi")
    for steps in (3, 10):  # ten steps of three hypotheses leave no room for another
        _, state, _ = walked(full, torch.randn(2, 3, steps, 32), [])
        attended, _ = full.step(torch.randn(0, 3, 32), reorder(state, torch.zeros(0, dtype=torch.long)))
        assert attended.output.shape == (0, 3, 32)


@torch.no_grad()
def test_a_hypothesis_without_numbers_leaves_the_others_alone() -> None:
    full, x = make_decoder(), torch.randn(2, 3, 6, 32)
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
    full, x = make_decoder(), torch.randn(1, 3, 4, 32)
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
    full, x = make_decoder(), torch.randn(1, MAX_SHARING + 1, 4, 32)
    state, _ = full.start(1, hypotheses=MAX_SHARING + 1)
    for t in range(4):
        attended, state = full.step(x[:, :, t], state, need_weights=True)
    assert "seen" not in state
    whole = full(x[0], need_weights=True)
    torch.testing.assert_close(attended.output[0], whole.output[:, -1])
    torch.testing.assert_close(attended.weights[0].transpose(0, 1), whole.weights[:, :, -1])


@torch.no_grad()
def test_many_that_branch_off_from_one_go_on_from_its_past() -> None:
    full, x = make_decoder(positions="rotary"), torch.randn(2, MAX_SHARING + 1, 4, 32)
    x[:, 1:, :2] = x[:, :1, :2]  # the past of the one
    state, _ = full.start(2, hypotheses=1)
    for t in range(4):
        if t == 2:
            state = reorder(state, torch.zeros(2, MAX_SHARING + 1, dtype=torch.long))
        attended, state = full.step(x[:, : 1 if t < 2 else None, t], state)
    whole = full(x.flatten(0, 1)).output[:, -1].unflatten(0, x.shape[:2])
    torch.testing.assert_close(attended.output, whole)
