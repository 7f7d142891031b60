"""Softmax in parts and over every prefix against one softmax over all keys."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtkit.attention.kernels.running_softmax import (
    CHUNK,
    add_keys,
    attend_part,
    join,
    join_parts,
    read_prefixes,
    start_softmax,
)
from mtkit.attention.states import reorder
from tests.contract.counting import saved_tensors


def test_parts_join_in_one_softmax() -> None:
    shapes = (2, 4, 50, 6), (2, 2, 50, 6), (2, 2, 50, 5), (2, 2, 7, 6), (2, 2, 7, 5)
    q, k, v, far_keys, far_values = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    seen, there = torch.rand(2, 1, 50, 50) < 0.5, torch.rand(2, 1, 50, 7) < 0.5
    bias = torch.randn(4, 50, 7, dtype=torch.float64)
    near = attend_part(q, k, v, scale=0.3, visible=seen)
    far = attend_part(q, far_keys, far_values, scale=0.3, visible=there, bias=bias)
    heads, log_sum = join_parts([near, far])
    k, v = (torch.cat(pair, dim=2).repeat_interleave(2, 1) for pair in ((k, far_keys), (v, far_values)))
    scores = 0.3 * q @ k.transpose(-1, -2) + F.pad(bias, (50, 0))
    scores = scores.masked_fill(~torch.cat([seen, there], dim=-1), float("-inf"))
    torch.testing.assert_close(heads, scores.softmax(-1) @ v)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1, keepdim=True))


def test_joining_nothing_changes_nothing() -> None:
    log_sum, mean = torch.randn(3), torch.randn(3, 4)
    joined = join(torch.full((3,), float("-inf")), torch.zeros(3, 4), log_sum, mean)
    torch.testing.assert_close(joined, (log_sum, mean))


def drawn(length: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Scores (2, 3, T) of three queries, and values (2, 1, T, 5) that they share."""
    scores, values = 4 * torch.randn(2, 3, length, **how), torch.randn(2, 1, length, 5, **how)
    return scores.requires_grad_(), values.requires_grad_()


def means_of(scores: Tensor, values: Tensor) -> Tensor:
    """(2, 3, T, 5), prefix by prefix."""
    means = [scores[..., :t].softmax(-1).unsqueeze(-2) @ values[..., :t, :] for t in range(1, scores.shape[-1] + 1)]
    return torch.cat(means, -2)


def agree(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(one, other)
    weight = torch.randn_like(other)
    gradients = (torch.autograd.grad((each * weight).sum(), inputs) for each in (one, other))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_every_prefix_has_its_own_softmax(length: int) -> None:
    scores, values = drawn(length, dtype=torch.float64)
    agree(read_prefixes(lambda means: means, scores, values), means_of(scores, values), [scores, values])


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_what_is_read_may_use_parameters_and_rows_also_in_a_checkpoint(use_reentrant: bool | None) -> None:
    scores, values = drawn(11, dtype=torch.float64)
    rows = torch.randn(2, 3, 11, 4, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(5, 4).double()

    def read(means: Tensor, rows: Tensor) -> Tensor:
        return linear(means).tanh() * rows

    def reading(scores: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        return read_prefixes(read, scores, values, rows, chunk=4)

    wanted = read(means_of(scores, values), rows)
    inputs = [scores, values, rows, linear.weight, linear.bias]
    weight = torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * weight).sum(), inputs)
    if use_reentrant is None:
        got = reading(scores, values, rows)
    else:
        got = checkpoint(reading, scores, values, rows, use_reentrant=use_reentrant)
    torch.testing.assert_close(got, wanted)
    (got * weight).sum().backward()
    for each, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(each.grad, gradient)


def test_dropout_is_the_same_in_both_passes() -> None:
    scores, values = drawn(9, dtype=torch.float64)
    output = read_prefixes(lambda means: nn.functional.dropout(means, 0.5), scores, values, chunk=4)
    dropped = output == 0
    assert dropped.any()
    kept = torch.where(dropped, 0.0, 2 * means_of(scores, values))
    agree(output, kept, [scores, values])


def test_what_is_kept_for_the_backward_pass_holds_no_means() -> None:
    scores, values = torch.randn(2, 1, 40, 640, requires_grad=True), torch.randn(2, 1, 1, 640, 8)
    saved = saved_tensors(lambda: read_prefixes(lambda means: means.sum(2), scores, values))
    assert sum(x.numel() for x in saved) < 640 * 40 * 8


def test_scores_of_any_size_stay_finite() -> None:
    scores = torch.tensor([-1e4, 1e4, 0.0] * 50)[None, None]
    assert read_prefixes(lambda means: means, scores, torch.randn(1, 1, 150, 2)).isfinite().all()


@pytest.mark.parametrize("several", [1, 3])
@torch.no_grad()
def test_keys_added_by_steps_are_the_prefixes_also_after_reorder(several: int) -> None:
    """scores (B, N, queries, T), values (B, N, 1, T, V)."""
    scores, values = 4 * torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 1, 6, 5, dtype=torch.float64)
    order = torch.tensor([[2, 0, 0], [1, 1, 2]])
    state = start_softmax(2, 3, 4, width=5, like=values)
    assert not state["mean"].any()
    for t in range(0, 6, several):
        if t == 3:
            state = reorder(state, order)
            scores, values = (x.take_along_dim(order.view(2, 3, *[1] * (x.dim() - 2)), 1) for x in (scores, values))
        state = add_keys(state, scores[..., t : t + several], values[..., t : t + several, :])
        wanted = scores[..., : t + several].softmax(-1).unsqueeze(-2) @ values[..., : t + several, :]
        torch.testing.assert_close(state["mean"], wanted.squeeze(-2))


@torch.no_grad()
def test_autocast_leaves_the_state_in_float32() -> None:
    """The mean of 600 ones and threes: weights of 1/600 in bfloat16 do not sum to one."""
    scores, values = (
        torch.zeros(1, 1, 600).bfloat16(),
        torch.tensor([1.0, 3.0]).repeat(300).view(1, 1, 600, 1).bfloat16(),
    )
    state = start_softmax(1, 1, width=1, like=values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        means = read_prefixes(lambda means: means, scores, values)
        for t in range(600):
            state = add_keys(state, scores[..., t : t + 1], values[..., t : t + 1, :])
    for mean in (means[0, 0, -1], state["mean"]):
        assert mean.dtype == torch.float32
        assert mean.item() == pytest.approx(2.0, abs=1e-5)
