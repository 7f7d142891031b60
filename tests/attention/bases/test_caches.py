"""Caches of decoding: rows in rings, and running sums."""

import pytest
import torch

from mtkit.attention import State
from mtkit.attention.bases.caches import (
    FIRST_CAPACITY,
    add_rows,
    append,
    exact_capacity,
    prefix_means,
    ring_place,
    start_cache,
    start_sums,
    written,
)
from mtkit.attention.states import reorder


def rows(count: int) -> torch.Tensor:
    """(count, B = 2, N = 3, heads = 2, width = 4)."""
    return torch.randn(count, 2, 3, 2, 4)


def test_what_was_written_is_read_back_in_order() -> None:
    tokens = rows(2 * FIRST_CAPACITY + 3)
    state = start_cache(2, 3, tokens, keys=(2, 4), values=(1, 5))
    for count, token in enumerate(tokens, start=1):
        state = append(state, keys=token, values=token.new_full((2, 3, 1, 5), count))
        assert state["count"] == count
        assert torch.equal(written(state, "keys"), tokens[:count].permute(1, 2, 3, 0, 4))
    assert written(state, "values")[0, 0, 0, :, 0].tolist() == list(range(1, len(tokens) + 1))


def test_a_cache_begins_with_its_first_token() -> None:
    tokens = rows(FIRST_CAPACITY + 1)
    state: State = {"count": 0}
    for token in tokens:
        state = append(state, keys=token)
    assert torch.equal(written(state, "keys"), tokens.permute(1, 2, 3, 0, 4))


def test_a_token_is_written_in_place_and_capacity_grows_by_half() -> None:
    tokens = rows(4 * FIRST_CAPACITY)
    state = start_cache(2, 3, tokens, keys=(2, 4))
    buffers = []  # held, so that no address is used twice
    for token in tokens:
        state = append(state, keys=token)
        if not any(buffer.data_ptr() == state["keys"].data_ptr() for buffer in buffers):
            buffers.append(state["keys"])
    assert [buffer.shape[3] / FIRST_CAPACITY for buffer in buffers] == [1, 2, 3, 4.5]


def test_nothing_is_reserved_in_a_cache_of_exact_capacity() -> None:
    tokens = rows(FIRST_CAPACITY + 3)
    with exact_capacity():
        state, ring = start_cache(2, 3, tokens, keys=(2, 4)), start_cache(2, 3, tokens, keys=(2, 4))
        for count, token in enumerate(tokens, start=1):
            state, ring = append(state, keys=token), append(ring, window=3, first=2, keys=token)
            assert torch.equal(state["keys"], tokens[:count].permute(1, 2, 3, 0, 4))
            assert ring["keys"].shape[3] == min(count, 5)
    assert append(state, keys=tokens[0])["keys"].shape[3] > len(tokens) + 1


def test_a_ring_keeps_the_last_tokens_and_their_positions() -> None:
    for window in (1, 3, FIRST_CAPACITY + 5):
        tokens = rows(2 * window + 2)
        state = start_cache(2, 3, tokens, keys=(2, 4))
        for count, token in enumerate(tokens, start=1):
            state = append(state, window=window, keys=token)
            kept = range(max(0, count - window), count)
            where = torch.tensor(sorted(kept, key=lambda position: ring_place(position, window)))
            assert torch.equal(written(state, "keys", window=window), tokens[where].permute(1, 2, 3, 0, 4))
        assert state["keys"].shape[3] <= max(window, FIRST_CAPACITY)


def test_a_ring_behind_first_tokens_overwrites_the_token_one_window_before() -> None:
    assert [ring_place(position, 3) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [ring_place(position, 3, 2) for position in range(9)] == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    assert [ring_place(position, None, 2) for position in range(4)] == [0, 1, 2, 3]
    state = start_cache(1, 1, torch.zeros(1), keys=(1, 1))
    for position in range(9):
        state = append(state, window=3, first=2, keys=torch.full((1, 1, 1, 1), float(position)))
    assert written(state, "keys", window=3, first=2).flatten().tolist() == [0, 1, 8, 6, 7]


def test_the_cache_takes_the_type_of_what_is_written() -> None:
    state = start_cache(1, 1, torch.zeros(1), keys=(1, 2))
    state = append(state, keys=torch.ones(1, 1, 1, 2, dtype=torch.bfloat16))
    assert written(state, "keys").dtype == torch.bfloat16


@pytest.mark.parametrize("length", [1, 2, 9])
def test_steps_are_the_means_over_each_prefix(length: int) -> None:
    x = torch.randn(2, 3, length, 4, dtype=torch.float64)
    given, state = x.clone(), start_sums("x")
    for t in range(length):
        state = add_rows(state, x=given[:, :, t])
        torch.testing.assert_close(state["x"] / state["count"], x[:, :, : t + 1].mean(2))
        torch.testing.assert_close(prefix_means(x)[:, :, t], x[:, :, : t + 1].mean(2))
    assert torch.equal(given, x)  # what was added is not written to


def test_sums_go_with_their_hypotheses_also_before_the_first_row() -> None:
    x, order = torch.randn(2, 3, 4, 5), torch.tensor([[2, 0], [1, 1]])
    state = reorder(start_sums("x"), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    for t in range(2):
        state = add_rows(state, x=x[:, :, t])
    state = reorder(state, order)
    rows = x.take_along_dim(order[:, :, None, None], dim=1)
    for t in range(2, 4):
        state = add_rows(state, x=rows[:, :, t])
    torch.testing.assert_close(state["x"], rows.sum(2))


def test_sums_are_in_float32() -> None:
    """A count of 600 in bfloat16 would stop at 256."""
    ones = torch.ones(1, 1, 600, 1, dtype=torch.bfloat16)
    state = start_sums("ones")
    for t in range(600):
        state = add_rows(state, ones=ones[:, :, t])
    assert state["ones"].item() == 600
    assert torch.equal(prefix_means(ones), ones.float())
