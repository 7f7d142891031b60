"""MoBA: limits, the choice of blocks, causality of the choice, cost of steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.content import moba
from tests.attention.small import ROLES, maker

VALID = torch.arange(22) < torch.tensor([[22], [13]])

make = maker("moba", double=True)


def alike(role: str, options: dict[str, Any], name: str, other: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Real rows of both mechanisms' outputs for the same weights and inputs, on a ragged batch."""
    ours, theirs = make(role, **options), make(role, name, **other)
    theirs.load_state_dict(ours.state_dict())
    memory = torch.randn(2, 22, 32).double() if role == "cross" else None
    masks = {"memory_valid" if role == "cross" else "query_valid": VALID}
    x = torch.randn(2, 22, 32).double()
    real = torch.ones_like(VALID) if role == "cross" else VALID
    return ours(x, memory, **masks).output[real], theirs(x, memory, **masks).output[real]


@pytest.mark.parametrize("role", ROLES)
def test_with_as_many_blocks_as_there_are_it_is_full_attention(role: str) -> None:
    for selected in (6, 100):
        torch.testing.assert_close(*alike(role, {"block": 4, "selected": selected}, "full", {}))
    ours, theirs = alike(role, {"block": 4, "selected": 5}, "full", {})
    assert not torch.allclose(ours, theirs)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_block_is_block_local_attention(role: str) -> None:
    torch.testing.assert_close(*alike(role, {"block": 4, "selected": 1}, "block-local", {"block_size": 4}))


def test_blocks_of_one_token_are_the_best_keys() -> None:
    torch.testing.assert_close(*alike("cross", {"block": 1, "selected": 5}, "topk", {"keys": 5}))


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_blocks_of_one_token_are_the_best_keys_and_the_own_one(role: str) -> None:
    attention, full, x = make(role, block=1, selected=4), make(role, "full"), torch.randn(1, 22, 32).double()
    full.load_state_dict(attention.state_dict())
    scores = full(x, need_weights=True).weights.log()
    best = scores.masked_fill(torch.eye(22).bool(), float("inf")).topk(4).indices
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & scores.isfinite()
    heads = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ attention.keys_values(x)[1]
    torch.testing.assert_close(attention(x).output, attention.merge_heads(heads, x))


def test_the_mean_of_a_partial_block_is_over_its_real_tokens() -> None:
    """The last block has one real token, with twice the score of the first block's tokens, and large ones behind it."""
    attention = make("cross", block=4, selected=1)
    memory = torch.randn(1, 12, 32).double()
    memory[:, :4] = memory[:, 8:9] / 2
    valid = torch.arange(12).unsqueeze(0) < 9
    memory[:, 9:] = 1e3
    query = torch.zeros(1, 1, 32).double()
    attention.q_proj.bias.data = attention.k_proj(memory[0, 8]).detach() * 100
    expected = attention.out_proj(attention.v_proj(memory[:, 8]))
    torch.testing.assert_close(attention(query, memory, memory_valid=valid).output[:, 0], expected)


def test_later_tokens_of_the_own_block_do_not_change_the_choice() -> None:
    """Each prefix alone gives what it gives within the whole, at every length."""
    attention, x = make("decoder", block=3, selected=2), torch.randn(1, 17, 32).double()
    whole = attention(x).output
    for length in range(1, 17):
        torch.testing.assert_close(attention(x[:, :length]).output, whole[:, :length])


@pytest.mark.parametrize("role", ROLES)
def test_equal_blocks_give_way_to_the_earlier_one(role: str) -> None:
    """With keys of zero all blocks tie."""
    attention = make(role, block=2, selected=2)
    torch.nn.init.zeros_(attention.k_proj.weight)
    x = torch.randn(1, 10, 32).double()
    values = attention.keys_values(x)[1]
    seen = [0, 1, 8, 9] if role != "cross" else [0, 1, 2, 3]
    expected = attention.merge_heads(values[:, :, seen].mean(2, keepdim=True), x[:, -1:])
    torch.testing.assert_close(attention(x, x if role == "cross" else None).output[:, -1:], expected)


def test_choices_are_made_in_float32_under_autocast() -> None:
    attention, x = make(block=2, selected=2).float(), torch.randn(1, 400, 32)
    chosen: list[Tensor] = []
    original = attention._chosen
    attention._chosen = lambda *inputs: chosen.append(original(*inputs)) or chosen[-1]
    with torch.no_grad():
        attention(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attention(x)
    assert torch.equal(chosen[0], chosen[1])


def test_scores_of_blocks_are_held_for_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make("decoder", block=2, selected=3), torch.randn(2, 50, 32).double()
    whole = attention(x).output
    monkeypatch.setattr(moba, "SCORES_AT_ONCE", 1500)
    torch.testing.assert_close(attention(x).output, whole)


def test_a_step_reads_the_chosen_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make("decoder", block=4, selected=2), torch.randn(1, 31, 32).double()
    read: list[int] = []
    original = moba.attend_step
    monkeypatch.setattr(
        moba, "attend_step", lambda q, keys, *rest, **how: read.append(keys.shape[3]) or original(q, keys, *rest, **how)
    )
    state, _ = attention.start(1)
    with torch.no_grad():
        for token in range(31):
            _, state = attention.step(x[:, token : token + 1], state)
    assert read == [*range(1, 9), *[8] * 23]
