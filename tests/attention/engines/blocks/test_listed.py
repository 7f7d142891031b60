"""Attention over lists of keys with labels: the plain softmax and its gradients, in parts of any size."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.engines.blocks import windowed_rows
from mtkit.attention.engines.blocks.listed import Lists, attend_listed

BATCH, HEADS, LENGTH, KEYS, LABELS = 2, 3, 10, 13, 4
BLOCKS, BLOCK, WIDTH = 4, 3, 6
HIDDEN = LABELS
Real = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(BATCH, HEADS, *shape, dtype=torch.float64, requires_grad=True)


def inputs() -> tuple[Real, Lists, Tensor]:
    """q, k, v and the table; lists in which one query sees nothing; a segment whose last keys are missing."""
    real = drawn(LENGTH, 5), drawn(KEYS, 5), drawn(KEYS, 7), drawn(LENGTH, LABELS)
    places = torch.stack([torch.randperm(KEYS)[:WIDTH] for _ in range(BLOCKS)])
    labels = torch.randint(LABELS + 1, (BLOCKS, BLOCK, WIDTH), dtype=torch.uint8)
    labels[1, 2] = HIDDEN
    return real, Lists(places, labels), torch.arange(KEYS) >= torch.tensor([[KEYS], [8]])


def plain(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lists: Lists, missing: Tensor) -> Tensor:
    """One query at a time."""
    rows = []
    for i in range(LENGTH):
        places, labels = lists.places[i // BLOCK], lists.labels[i // BLOCK, i % BLOCK].long()
        scores = (k[:, :, places] * q[:, :, i, None]).sum(-1) * 0.5 + table[:, :, i, labels.clamp(max=LABELS - 1)]
        scores = scores.masked_fill((labels == HIDDEN) | missing[:, None, places], float("-inf"))
        weights = torch.where((scores > float("-inf")).any(-1, keepdim=True), scores, 0.0).softmax(-1)
        weights = weights.masked_fill(scores == float("-inf"), 0.0)
        rows.append((weights.unsqueeze(-1) * v[:, :, places]).sum(2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("at_once", [1, 2 * BLOCK * WIDTH, 2 * BLOCKS * BLOCK * WIDTH, 1 << 20])
def test_it_is_a_softmax_and_has_its_gradients(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(windowed_rows.SCORES_AT_ONCE, "cpu", at_once)
    real, lists, missing = inputs()
    heads = attend_listed(*real, lists, missing=missing, scale=0.5)
    wanted = plain(*real, lists, missing)
    torch.testing.assert_close(heads, wanted)
    assert not heads[:, :, BLOCK + 2].any(), "a query that sees no key gets zero"
    upwards = torch.randn_like(heads)
    for ours, theirs in zip(*(torch.autograd.grad(each, real, upwards) for each in (heads, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    real, lists, missing = inputs()

    def attended(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        q, k, v, table = given
        return attend_listed(q, k, v, table, lists, missing=missing, scale=0.5, dropout=0.4)

    assert torch.autograd.gradcheck(attended, real)
    whole = attend_listed(*real, lists, missing=missing, scale=0.5)
    assert not torch.allclose(attended(*real), whole)
    many = torch.stack([attend_listed(*real, lists, scale=0.5, dropout=0.4) for _ in range(400)]).mean(0)
    assert (many - attend_listed(*real, lists, scale=0.5)).abs().mean() < 0.05


def test_a_table_without_gradient_is_left_alone() -> None:
    (q, k, v, table), lists, _ = inputs()
    heads = attend_listed(q, k, v, table.detach(), lists, scale=0.5)
    (d_q,) = torch.autograd.grad(heads.sum(), q)
    assert d_q.any()
