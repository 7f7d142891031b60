"""Low-rank and band heads: each kind against the attention it is in the limit, and what a step keeps of both."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, maker, refusals

make = maker("low-rank-band")


def inputs(role: str, length: int = 13) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Query, memory in the cross role, and the mask of its keys."""
    x, valid = torch.randn(2, length, 32), torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    return (x, torch.randn(2, 9, 32), {"memory_valid": valid}) if role == "cross" else (x, None, {})


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_low_rank_heads_of_full_rank_alone_are_full_attention(role: str) -> None:
    ours, full = make(role, rank=8, band_heads=0), make(role, "full")
    full.load_state_dict(ours.state_dict())
    x, memory, masks = inputs(role)
    got, wanted = (each(x, memory, need_weights=True, **masks) for each in (ours, full))
    torch.testing.assert_close(got.output, wanted.output, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.weights, wanted.weights, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(x, memory, **masks).output, wanted.output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("length", [1, 2, 13, 70])
@torch.no_grad()
def test_a_band_as_wide_as_the_segment_beside_full_rank_is_full_attention(role: str, length: int) -> None:
    ours, full = make(role, rank=8, band=length - 1), make(role, "full")
    full.load_state_dict(ours.state_dict())
    x = torch.randn(2, length, 32)
    torch.testing.assert_close(ours(x).output, full(x).output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_band_heads_alone_are_band_attention(role: str) -> None:
    ours, band = make(role, band_heads=4, band=3), make(role, "band", window_radius=3)
    band.load_state_dict(ours.state_dict())
    x = torch.randn(2, 70, 32)
    torch.testing.assert_close(ours(x).output, band(x).output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_each_kind_of_heads_is_that_attention_of_its_own_width(role: str) -> None:
    """The reference divides by the root of the width it is given: 3 in low-rank heads, 8 in band heads."""
    ours, x = make(role, rank=3, band=2), torch.randn(2, 11, 32)
    ours.out_proj.weight.copy_(torch.eye(32))
    q, k, v = ours.q_proj(x), ours.k_proj(x), ours.v_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    assert q.shape[-1] == 2 * 3 + 2 * 8
    i, j = torch.arange(11)[:, None], torch.arange(11)
    past = j <= i if role == "decoder" else torch.ones(11, 11, dtype=torch.bool)
    heads = []
    for columns, width, mask, own in [
        (slice(0, 6), 3, past, v[:, :2]),
        (slice(6, 22), 8, past & ((i - j).abs() <= 2), v[:, 2:]),
    ]:
        rows = (each[..., columns].unflatten(-1, (2, width)).transpose(1, 2) for each in (q, k))
        heads.append(F.scaled_dot_product_attention(*rows, own, attn_mask=mask))
    wanted = torch.cat(heads, 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours(x).output, wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_scores_of_low_rank_heads_have_that_rank_and_their_softmax_has_not() -> None:
    """Up to the constant of each row, which the softmax takes away."""
    ours = make(rank=3).double()
    weights = ours(torch.randn(1, 20, 32, dtype=torch.float64), need_weights=True).weights[0, :2]
    scores = weights.log() - weights.log()[..., :1]
    assert torch.linalg.matrix_rank(scores, rtol=1e-9).tolist() == [3, 3]
    assert (torch.linalg.matrix_rank(weights, rtol=1e-9) > 3).all()


@torch.no_grad()
def test_low_rank_heads_reach_every_token_and_band_heads_their_band() -> None:
    for role, far, near in [("encoder", 40, 7), ("decoder", 21, 4)]:
        weights = make(role, band=3, band_heads=1)(torch.randn(1, 40, 32), need_weights=True).weights
        assert ((weights[0, :, 20] > 0).sum(-1)).tolist() == [far, far, far, near]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("rank", "true_rank"), [(3, 3), (5, 3), (16, 8)])
@torch.no_grad()
def test_scores_of_full_that_have_the_rank_are_adopted_exactly(role: str, rank: int, true_rank: int) -> None:
    full = make(role, "full").double()
    for projection in (full.q_proj, full.k_proj):
        maps = torch.randn(4, 8, true_rank).double() @ torch.randn(4, true_rank, 32).double() / 8
        projection.weight.copy_(maps.flatten(0, 1))
        projection.bias.copy_((maps @ torch.randn(32).double() / 4).flatten())
    ours = make(role, rank=rank, band=50).double()
    ours.adopt(full.state_dict())
    x, memory, masks = inputs(role)
    x, memory = x.double(), None if memory is None else memory.double()
    wanted = full(x, memory, **masks).output
    torch.testing.assert_close(ours(x, memory, **masks).output, wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_adopted_scores_come_nearer_with_every_rank() -> None:
    full, x = make(name="full").double(), torch.randn(2, 12, 32, dtype=torch.float64)
    wanted, errors = full(x).output, []
    for rank in (1, 3, 5, 7):
        ours = make(rank=rank, band_heads=0).double()
        ours.adopt(full.state_dict())
        errors.append((ours(x).output - wanted).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.3 * errors[0]


@torch.no_grad()
def test_a_step_keeps_narrow_keys_of_all_tokens_and_the_last_of_band_heads() -> None:
    ours = make("decoder", rank=2, band=3)
    state, _ = ours.start(2, hypotheses=3)
    for _ in range(40):
        _, state = ours.step(torch.randn(2, 3, 32), state)
    low, near = state["groups"]
    assert low["keys"].shape[4] == 2
    assert low["keys"].shape[3] >= 40
    assert near["keys"].shape[4] == 8
    assert near["keys"].shape[3] <= 8  # the cache's first room, which holds the 4 that are seen


@pytest.mark.parametrize("name", [None, "alibi"])
@torch.no_grad()
def test_weights_of_steps_are_those_of_the_whole(name: str | None) -> None:
    ours, x = make("decoder", rank=3, band=2, positions=name), torch.randn(2, 9, 32)
    whole = ours(x, need_weights=True)
    state, _ = ours.start(2)
    for t in range(9):
        attended, state = ours.step(x[:, t : t + 1], state, need_weights=True)
        torch.testing.assert_close(attended.weights[:, :, 0], whole.weights[:, :, t, : t + 1])
        torch.testing.assert_close(attended.output[:, 0], whole.output[:, t])


def test_the_cross_role_has_low_rank_heads_alone() -> None:
    assert make("cross").q_proj.out_features == 4 * 16
    with pytest.raises(MtkitError, match="band_heads = 2 must be from 0 to 0 in the cross role"):
        make("cross", band_heads=2)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"band_heads": 5}, "band_heads = 5 must be from 0 to 4"),
    ({"rank": 0}, "rank = 0"),
    ({"band": -1}, "band = -1"),
    ({"positions": "rotary"}, "cannot combine with positions=rotary"),
    ({"projection": "multi-query"}, "cannot combine with projection=multi-query"),
    role="decoder",
)
