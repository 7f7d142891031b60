"""Attention within lines: each line by itself, in a whole pass, at its end, and from all pairs of the sequence."""

import pytest
import torch

from mtkit.attention import build
from mtkit.attention.contract import Site
from mtkit.attention.sparse._line_attention import LineAttention


def make(positions: str | None = None, role: str = "decoder") -> LineAttention:
    return LineAttention(Site(role, 32, 4, positions=positions)).eval()


@pytest.mark.parametrize("positions", [None, "rotary", "alibi", "shaw"])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_each_line_is_full_attention_of_its_own(positions: str | None, causal: bool) -> None:
    part = make(positions)
    full = build("full", role="decoder" if causal else "encoder", d_model=32, heads=4, positions=positions).eval()
    full.load_state_dict(part.state_dict())
    x, valid = torch.randn(2, 3, 5, 32), torch.arange(5) < torch.tensor([[5, 4, 1], [5, 2, 3]])[..., None]
    output, losses = part.along(x, valid, causal=causal)
    assert not losses
    for one in range(2):
        for line in range(3):
            real = valid[one, line]
            alone = full(x[one, line][real][None]).output[0]
            torch.testing.assert_close(output[one, line][real], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [None, "rotary", "alibi", "shaw"])
@torch.no_grad()
def test_the_end_of_a_line_is_the_last_of_the_pass(positions: str | None) -> None:
    """Lines of 4 of one segment, as hypotheses are laid out in decoding."""
    part, x = make(positions), torch.randn(2, 3, 4, 32)
    expected, _ = part.along(x, None, causal=True)
    every = [part.newest(x[:, :, place], place) for place in range(4)]
    keys, values = (torch.stack([each[number] for each in every], dim=3) for number in (1, 2))
    output = part.at_the_end(every[-1][0], keys, values)
    torch.testing.assert_close(output, expected[:, :, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_all_pairs_of_the_sequence_give_the_same(causal: bool) -> None:
    part, x = make("rotary"), torch.randn(2, 12, 32)
    position = torch.arange(12)
    stated = part.naive_along(x, position // 4, position % 4, causal, None)
    expected, _ = part.along(x.unflatten(1, (3, 4)), None, causal=causal)
    torch.testing.assert_close(stated, expected.flatten(1, 2), rtol=1e-5, atol=1e-5)
