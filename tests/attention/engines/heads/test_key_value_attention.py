"""What a step attends with: the keys and values that the whole sequence has, of each hypothesis or of the source."""

from typing import Any

import torch

from mtkit.attention import build


def make(role: str, **arguments: Any) -> Any:
    return build("realformer", role=role, d_model=32, heads=4, **arguments).eval()


@torch.no_grad()
def test_the_cache_holds_the_rotated_keys_of_each_hypothesis() -> None:
    attention, x = make("decoder", positions="rotary", projection="multi-query"), torch.randn(2, 3, 5, 32)
    state, _ = attention.start(2, hypotheses=3)
    for t in range(5):
        newest, state = attention.newest(x[:, :, t], state)
    keys, values = attention.keys_values(x.flatten(0, 1))
    torch.testing.assert_close(newest.keys, keys)
    torch.testing.assert_close(newest.values, values)
    torch.testing.assert_close(newest.q, attention.queries(x.flatten(0, 1))[:, :, 4:])
    assert newest.visible is None
    assert newest.query_position.tolist() == [4]
    assert newest.key_position.tolist() == list(range(5))


@torch.no_grad()
def test_hypotheses_read_the_source_without_a_copy() -> None:
    attention, memory = make("cross", memory_width=12), torch.randn(2, 7, 12)
    valid = torch.tensor([[True] * 7, [True] * 2 + [False] * 5])
    state, _ = attention.start(2, memory, valid, hypotheses=3)
    newest, after = attention.newest(torch.randn(2, 3, 32), state)
    assert newest.keys is state["shared"]["keys"]
    assert after is state
    assert newest.q.shape == (2, 4, 3, 8)
    assert newest.visible is not None
    assert torch.equal(newest.visible[:, 0, 0], valid)
