"""Attention over lists of keys with labels: the plain softmax and its gradients, in parts of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import tiled_softmax
from mtkit.attention.kernels.listed import LabelScores, Lists, attend_listed

BATCH, HEADS, LENGTH, KEYS, LABELS = 2, 3, 10, 13, 4
BLOCKS, BLOCK, WIDTH = 4, 3, 6
HIDDEN = LABELS
Real = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs(tables: int = HEADS) -> tuple[Real, Lists, Tensor]:
    """q, k, v and the tables; lists in which one query sees nothing; a segment whose last keys are missing."""
    rows = (drawn(BATCH, HEADS, *shape) for shape in ((LENGTH, 5), (KEYS, 5), (KEYS, 7)))
    real = *rows, drawn(tables, LABELS, 5), drawn(tables, LABELS)
    places = torch.stack([torch.randperm(KEYS)[:WIDTH] for _ in range(BLOCKS)])
    labels = torch.randint(LABELS + 1, (BLOCKS, BLOCK, WIDTH), dtype=torch.uint8)
    labels[1, 2] = HIDDEN
    return real, Lists(places, labels), torch.arange(KEYS) >= torch.tensor([[KEYS], [8]])


def attended(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor, lists: Lists, **how: Any) -> Tensor:
    return attend_listed(q, k, v, LabelScores(*tables), lists, scale=0.5, **how)


def plain(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, biases: Tensor, *, lists: Lists, missing: Tensor) -> Tensor:
    """One query at a time."""
    rows, table = [], 0.5 * (q @ vectors.mT + biases.unsqueeze(1))
    for i in range(LENGTH):
        places, labels = lists.places[i // BLOCK], lists.labels[i // BLOCK, i % BLOCK].long()
        scores = (k[:, :, places] * q[:, :, i, None]).sum(-1) * 0.5 + table[:, :, i, labels.clamp(max=LABELS - 1)]
        scores = scores.masked_fill((labels == HIDDEN) | missing[:, None, places], float("-inf"))
        weights = torch.where((scores > float("-inf")).any(-1, keepdim=True), scores, 0.0).softmax(-1)
        weights = weights.masked_fill(scores == float("-inf"), 0.0)
        rows.append((weights.unsqueeze(-1) * v[:, :, places]).sum(2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("tables", [1, HEADS])
@pytest.mark.parametrize("at_once", [1, 2 * BLOCK * WIDTH, 2 * BLOCKS * BLOCK * WIDTH, 1 << 20])
def test_it_is_a_softmax_and_has_its_gradients(at_once: int, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiled_softmax.SCORES_AT_ONCE, "cpu", at_once)
    real, lists, missing = inputs(tables)
    heads = attended(*real, lists=lists, missing=missing)
    wanted = plain(*real, lists=lists, missing=missing)
    torch.testing.assert_close(heads, wanted)
    assert not heads[:, :, BLOCK + 2].any(), "a query that sees no key gets zero"
    upwards = torch.randn_like(heads)
    for ours, theirs in zip(*(torch.autograd.grad(each, real, upwards) for each in (heads, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    real, lists, missing = inputs()

    def dropped(*given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)  # of no accelerator: gradcheck calls it thousands of times
        return attended(*given, lists=lists, missing=missing, dropout=0.4)

    assert torch.autograd.gradcheck(dropped, real)
    whole = attended(*real, lists=lists, missing=missing)
    assert not torch.allclose(dropped(*real), whole)
    many = torch.stack([attended(*real, lists=lists, dropout=0.4) for _ in range(400)]).mean(0)
    assert (many - attended(*real, lists=lists)).abs().mean() < 0.05


def test_gradients_are_the_same_under_autocast() -> None:
    real, lists, missing = inputs()
    real = tuple(each.detach().float().requires_grad_() for each in real)  # type: ignore[assignment]
    heads = attended(*real, lists=lists, missing=missing)
    upwards = torch.randn_like(heads)
    plainly = torch.autograd.grad(heads, real, upwards, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(heads, real, upwards)
    assert all(torch.equal(*pair) for pair in zip(plainly, inside, strict=True))
