"""Blocks that each query chooses: the choice, and the softmax over it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import chosen_blocks
from mtkit.attention.kernels.chosen_blocks import FORCED, Near, attend_chosen, best_blocks
from mtkit.attention.kernels.dot_product import safe_softmax
from mtkit.attention.kernels.flash import chosen

INF = float("inf")


def test_the_best_blocks_come_first_and_ties_go_to_the_lower_number() -> None:
    scores = torch.tensor([[0.0, -2.0, 3.0, -0.0, 3.0], [-INF, -1.0, INF, -INF, -3.0], [-INF] * 5])
    assert best_blocks(scores, 3).tolist() == [[2, 4, 0], [2, 1, 4], [5, 5, 5]]
    assert best_blocks(scores[:1], 7).tolist() == [[2, 4, 0, 3, 1, 5, 5]]
    assert best_blocks(scores, 0).shape == (3, 0)


def test_the_choice_is_that_of_a_stable_sort_and_independent_of_blocks_without_a_score() -> None:
    scores = torch.randn(50, 40).mul(3).round()  # many ties, both signs
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    assert torch.equal(best_blocks(scores, 6), expected)
    wider = torch.cat([scores, torch.full((50, 300), -INF)], 1)
    assert torch.equal(best_blocks(wider, 6), expected)


def test_the_choice_on_an_accelerator_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled loop: with ties, too few blocks with a score, more places than blocks."""
    scores = torch.randn(3, 40, 30).mul(2).round()
    scores[scores < -2] = -INF
    scores[0, 0] = -INF
    ours = [best_blocks(scores, count) for count in (0, 1, 7, 33)]
    monkeypatch.setattr(chosen_blocks, "has_loops", lambda device: False)
    assert all(torch.equal(x, best_blocks(scores, count)) for x, count in zip(ours, (0, 1, 7, 33), strict=True))


def literal(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, size: int, causal: bool, valid: Tensor | None) -> Tensor:
    heads = q.shape[1]
    k, v, chosen = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v, chosen))
    block = torch.arange(k.shape[2]) // size
    visible = (chosen.unsqueeze(-1) == block).any(-2)
    if causal:
        visible &= torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    if valid is not None:
        visible &= valid[:, None, None]
    return safe_softmax(q @ k.mT * 0.5, visible) @ v


@pytest.mark.parametrize(("groups", "choosing"), [((4, 4), 4), ((2, 2), 2), ((4, 2), 1)])
@pytest.mark.parametrize("near", [None, Near(), Near(1, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [5, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_a_softmax_over_the_chosen_blocks(
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[int, int],
    choosing: int,
    near: Near | None,
    causal: bool,
    padded: bool,
    width: int,
    dtype: torch.dtype,
) -> None:
    """Several tiles and streams at a time, an incomplete last block, choices of none, keys as wide as values or not.

    In float32, compiled loops read keys that are as wide as values.
    """
    if causal and near is None:
        near = Near(0, 3, 0)  # later blocks are not seen
    monkeypatch.setattr(chosen_blocks, "ROWS_AT_ONCE", {"cpu": 70})
    monkeypatch.setattr(chosen_blocks, "scores_at_once", lambda device: 60)
    monkeypatch.setattr(chosen, "TOGETHER", 5)
    monkeypatch.setattr(chosen, "PAIRS_AT_ONCE", 200)
    monkeypatch.setattr(chosen, "ROWS_AT_ONCE", 20)
    length, keys, size = 23, 31 if near is None else 23, 4
    blocks = -(-keys // size)
    q, k, v = (
        torch.randn(2, h, n, w, dtype=dtype).requires_grad_()
        for h, n, w in ((4, length, 6), (groups[0], keys, 6), (groups[1], keys, width))
    )
    choices = best_blocks(scores_for(choosing, length, blocks, size, near, causal), 5)
    assert (choices == blocks).any()
    valid = torch.arange(keys) < torch.tensor([[keys], [9]]) if padded else None
    outputs = [
        attend_chosen(q, k, v, choices, size, scale=0.5, near=near, causal=causal, valid=valid),
        literal(q, k, v, choices, size, causal, valid),
    ]
    if causal and padded:  # padding on the right is hidden from real queries only
        outputs = [x[:, :, :9] for x in outputs]
    weight = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((output * weight).sum(), (q, k, v)) for output in outputs]
    near_to = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outputs[0], outputs[1], **near_to)
    torch.testing.assert_close(gradients[0], gradients[1], **near_to)


def scores_for(heads: int, length: int, blocks: int, size: int, near: Near | None, causal: bool) -> Tensor:
    """Random scores, some of them none; blocks near a query are the best, its own one first."""
    scores, number = torch.randn(2, heads, length, blocks), torch.arange(blocks)
    scores[:, :, :, 2:].masked_fill_(torch.rand(2, heads, length, blocks - 2) < 0.5, -INF)
    scores[:, :, 3] = -INF
    if near is None:
        return scores
    own = torch.arange(length).unsqueeze(-1) // size
    scores = scores.masked_fill(near.sees(own, number), FORCED).masked_fill(number == own, INF)
    return scores.masked_fill(number > own, -INF) if causal else scores


def test_queries_without_any_choice_get_zero() -> None:
    q, k, v = (torch.randn(2, 2, 9, 4).double().requires_grad_() for _ in range(3))
    output = attend_chosen(q, k, v, torch.full((2, 2, 9, 3), 3), 3, scale=1.0)
    gradients = torch.autograd.grad(output.sum(), (q, k, v))
    assert all(not x.any() for x in (output, *gradients))


def test_many_queries_of_one_block_are_as_exact_as_few() -> None:
    """All queries choose the same block, and one other block each, whose scores are far larger."""
    q, k, v = (torch.randn(1, 1, 300, 4).double().requires_grad_() for _ in range(3))
    choices = torch.stack([torch.zeros(300).long(), 1 + torch.arange(300) % 5], -1).view(1, 1, 300, 2)
    output = attend_chosen(q, k, v, choices, 50, scale=60.0)
    wanted = safe_softmax(q @ k.mT * 60.0, (choices.unsqueeze(-1) == torch.arange(300) // 50).any(-2)) @ v
    torch.testing.assert_close(output, wanted)


def test_dropout_is_the_same_in_both_passes() -> None:
    """The gradient of a linear function of the values is what the output says it is."""
    q, k, v = (torch.randn(1, 2, 20, 4).double().requires_grad_() for _ in range(3))
    choices = best_blocks(torch.randn(1, 2, 20, 5), 2)
    output = attend_chosen(q, k, v, choices, 4, scale=1.0, dropout=0.5)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), output.sum())


def test_memory_is_that_of_the_queries() -> None:
    """No tensor holds the scores of all queries, or their keys; one may hold a row for each choice of a head."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(x))
            return result

    q, k, v = (torch.randn(1, 1, 16384, 8).requires_grad_() for _ in range(3))
    choices = best_blocks(torch.randn(1, 1, 16384, 256), 4)
    with Sizes():
        attend_chosen(q, k, v, choices, 64, scale=1.0).sum().backward()
    assert max(sizes) <= 1.25 * 4 * 16384 * 8  # of 16384 * 4 * 64 scores
