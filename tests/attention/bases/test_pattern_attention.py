"""What all mechanisms over a pattern share: what decoding keeps and reads."""

import pytest
import torch

from mtkit.attention import build
from mtkit.attention.bases.caches import FIRST_CAPACITY


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
