"""Attention over windows of keys: the plain softmax and its gradients, in parts of any size, dropout included."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import windows
from mtkit.attention.windows import NOTHING_SEEN, Part, attend_windows

STREAMS, BLOCKS, BLOCK, WIDTH = 3, 4, 2, 6


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def inputs() -> tuple[list[Tensor], Tensor]:
    """q, k, v, and which keys are hidden: all of them for one query, and for one key of the windows."""
    keys = (BLOCKS - 1) * BLOCK + WIDTH
    hidden = (torch.rand(STREAMS, BLOCKS, BLOCK, WIDTH) < 0.3).double()
    hidden[1, 2, 0] = 1
    return [drawn(STREAMS, BLOCKS, BLOCK, 5), drawn(STREAMS, keys, 5), drawn(STREAMS, keys, 7)], hidden


def plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One block at a time, with scores masked by replacement."""
    heads, sums = [], []
    for block in range(BLOCKS):
        near = slice(block * BLOCK, block * BLOCK + WIDTH)
        scores = (q[:, block] @ k[:, near].transpose(1, 2) * 0.5).masked_fill(hidden[:, block] > 0, float("-inf"))
        heads.append(scores.softmax(-1).nan_to_num() @ v[:, near])
        sums.append(scores.logsumexp(-1, keepdim=True))
    return torch.stack(heads, 1), torch.stack(sums, 1)


@pytest.mark.parametrize("at_once", [1, 2 * BLOCK * WIDTH, 2 * BLOCKS * BLOCK * WIDTH, 1 << 20])
def test_it_is_a_softmax_and_has_its_gradients(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(windows.SCORES_AT_ONCE, "cpu", at_once)
    (q, k, v), hidden = inputs()
    heads, sums = attend_windows(q, k, v, lambda part: hidden[part], scale=0.5)
    wanted, wanted_sums = plain(q, k, v, hidden)
    torch.testing.assert_close(heads, wanted)
    seen = hidden.amin(-1, keepdim=True) == 0
    torch.testing.assert_close(sums[seen], wanted_sums[seen])
    assert (sums[~seen] < NOTHING_SEEN).all()
    assert not heads[~seen.squeeze(-1)].any()
    upwards = torch.randn_like(heads), torch.randn_like(sums)
    own = torch.autograd.grad([heads, sums], [q, k, v], upwards)
    wanted_sums = torch.where(seen, wanted_sums, 0.0)
    real = [q, k, v]
    expected = torch.autograd.grad([wanted, wanted_sums], real, [upwards[0], upwards[1]])
    for ours, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num())


def test_dropout_drops_its_share_and_is_the_same_in_the_backward_pass() -> None:
    (q, k, _), hidden = inputs()
    ones = torch.eye(k.shape[1], dtype=torch.float64).expand(STREAMS, -1, -1).contiguous().requires_grad_()

    def attended(v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_windows(q, k, v, lambda part: hidden[part], scale=0.5, dropout=0.4)[0]

    weights = attended(ones)  # by key
    kept = (weights > 0).sum() / (hidden == 0).sum()
    assert 0.4 < kept < 0.8
    assert torch.autograd.gradcheck(attended, (ones,))
    (d_q,) = torch.autograd.grad(attended(ones).square().sum(), q)
    step = torch.randn_like(q) * 1e-6
    before = attended(ones).square().sum()
    with torch.no_grad():
        q += step
    assert (attended(ones).square().sum() - before).item() == pytest.approx((d_q * step).sum().item(), rel=1e-3)


def test_hidden_is_asked_for_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(windows.SCORES_AT_ONCE, "cpu", 2 * BLOCK * WIDTH)
    (q, k, v), hidden = inputs()
    parts: list[Part] = []

    def part_of(part: Part) -> Tensor:
        parts.append(part)
        return hidden[part]

    attend_windows(q, k, v, part_of, scale=1.0)
    assert len(parts) == STREAMS * BLOCKS // 2
