"""Attention over layouts of windows: the plain softmax over all they show, its gradients, in parts of any size."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels import tiled_softmax, windowed_rows
from mtkit.attention.kernels.tiled_softmax import FAR
from mtkit.attention.kernels.windowed_rows import attend_layouts, stream_rows

BATCH, LENGTH, HEADS = 2, 7, 2
ROWS = BATCH * LENGTH * HEADS


class Shuffled:
    """Tokens of each stream in any order, each beside some of those before it; what `taken` (R, R) has is hidden."""

    block, positions_before, width, stream_blocks = 2, 2, 4, 4

    def __init__(self, taken: Tensor) -> None:
        rows = stream_rows((BATCH, LENGTH, HEADS), torch.device("cpu"))
        order = torch.rand(rows.shape).argsort()
        self.place = order.argsort() + torch.arange(len(rows)).unsqueeze(-1) * self.stream_blocks * self.block
        self.keys = F.pad(
            F.pad(rows.gather(1, order), (0, 1), value=ROWS).flatten(), (self.positions_before, 0), value=ROWS
        )
        i = self.keys[self.positions_before :].unflatten(0, (-1, self.block)).unsqueeze(-1)
        j = self.keys.unfold(0, self.width, self.block).unsqueeze(1)
        stream = F.pad(
            torch.arange(len(rows)).repeat_interleave(self.stream_blocks * self.block),
            (self.positions_before, 0),
            value=-1,
        )
        other = stream.unfold(0, self.width, self.block).unsqueeze(1) != stream[self.positions_before :].view(
            -1, self.block, 1
        )
        again = F.pad(taken, (0, 1, 0, 1), value=True)[i, j]
        nothing = i < HEADS  # is seen by the first token
        self.hidden = (torch.rand(other.shape) < 0.3) | other | again | nothing
        self.shown = torch.zeros(ROWS + 1, ROWS + 1, dtype=torch.bool)
        self.shown[i.expand_as(other)[~self.hidden], j.expand_as(other)[~self.hidden]] = True
        self.shown = self.shown[:ROWS, :ROWS]

    def hide(self, scores: Tensor, blocks: slice) -> None:
        scores += self.hidden[blocks] * FAR


def layouts() -> tuple[list[Shuffled], Tensor]:
    """Two of them, and the pairs (R, R) that they show."""
    first = Shuffled(torch.zeros(ROWS, ROWS, dtype=torch.bool))
    second = Shuffled(first.shown)
    assert not (first.shown & second.shown).any()
    return [first, second], first.shown | second.shown


def drawn(width: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS, width, dtype=torch.float64, requires_grad=True)


def plain(q: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """All pairs, with scores masked by replacement."""
    rows, values = q.flatten(0, 2), v.flatten(0, 2)
    scores = rows @ F.normalize(rows, dim=-1).T
    seen = shown | ~shown.any(-1, keepdim=True) & torch.eye(ROWS, dtype=torch.bool)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).view_as(v)


@pytest.mark.parametrize(("scores", "rows"), [(1, 1), (16, 2 * LENGTH), (40, 3 * LENGTH), (1 << 20, 1 << 20)])
def test_it_is_a_softmax_and_has_its_gradients(scores: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiled_softmax.SCORES_AT_ONCE, "cpu", scores)
    monkeypatch.setitem(windowed_rows.ROWS_AT_ONCE, "cpu", rows)
    q, v, (laid_out, shown) = drawn(5), drawn(3), layouts()
    alone = ~shown.any(-1)
    assert alone.any(), "some see nothing"
    assert not alone.all()
    heads, wanted = attend_layouts(q, v, laid_out), plain(q, v, shown)
    torch.testing.assert_close(heads, wanted)
    assert torch.equal(heads.flatten(0, 2)[alone], v.flatten(0, 2)[alone])
    upwards = torch.randn_like(heads)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, v), upwards) for x in (heads, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, v, (laid_out, shown) = drawn(5), drawn(3), layouts()
    far = (q * 1e3).float()
    torch.testing.assert_close(attend_layouts(far, v.float(), laid_out), plain(far, v.float(), shown))


def test_dropout_drops_its_share_and_is_the_same_in_the_backward_pass() -> None:
    q, (laid_out, shown) = drawn(5), layouts()
    ones = torch.eye(ROWS, dtype=torch.float64).expand(ROWS, ROWS).view(BATCH, LENGTH, HEADS, ROWS).requires_grad_()

    def attended(q: Tensor, v: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)  # of no accelerator: gradcheck calls it thousands of times
        return attend_layouts(q, v, laid_out, dropout=0.4)

    weights = attended(q, ones).flatten(0, 2)  # by key
    kept = (weights[shown] > 0).double().mean()
    assert 0.45 < kept < 0.75
    assert not weights[~shown & shown.any(-1, keepdim=True)].any()
    v = drawn(3)
    assert torch.autograd.gradcheck(attended, (q, v))
