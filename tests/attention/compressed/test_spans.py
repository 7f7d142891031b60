"""Summaries of spans of keys against loops over the spans."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.bases.caches import written
from mtkit.attention.compressed._spans import (
    Pool,
    Spans,
    append_row,
    convolution,
    kept_spans,
    mean,
    pooled,
    span_lists,
    span_rows,
    spans_seen,
    spans_valid,
    start_spans,
)
from mtkit.attention.contract import State
from mtkit.attention.kernels.dot_product import safe_softmax
from mtkit.attention.kernels.listed import attend_listed
from mtkit.attention.states import reorder

SPANS = [Spans(1, 1), Spans(3, 3), Spans(5, 4), Spans(4, 1), Spans(2, 3)]
each_spans = pytest.mark.parametrize("spans", SPANS, ids=lambda spans: f"{spans.size}-{spans.stride}")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def looped(x: Tensor, lengths: list[int], spans: Spans, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Span after span of x (B, G, T, K): the mean of its real rows, or each row times the matrix of its place."""
    segments = []
    for segment, length in zip(x, lengths, strict=True):
        made = []
        for start in range(0, x.shape[2], spans.stride):
            places = range(start, min(start + spans.size, length))
            made.append(segment[:, :0].sum(1) if weight is None else bias.expand(len(segment), -1))
            for place in places:
                row = segment[:, place]
                if weight is not None:
                    row = (row.unsqueeze(1) @ weight[:, place - start]).squeeze(1)
                made[-1] = made[-1] + (row / len(places) if weight is None else row)
        segments.append(torch.stack(made, 1))
    return torch.stack(segments)


@each_spans
@pytest.mark.parametrize("length", [1, 2, 7, 12])
@pytest.mark.parametrize("kind", ["mean", "heads", "shared"])
def test_summaries_are_those_of_a_loop_with_gradients(spans: Spans, length: int, kind: str) -> None:
    x, lengths = numbers(3, 2, length, 4), [length, max(length - 3, 1), 1]
    valid = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    pool: Pool = mean
    weight = bias = None
    inputs = [x]
    if kind != "mean":
        groups = 2 if kind == "heads" else 1
        weight, bias = numbers(groups, spans.size, 4, 3), numbers(groups, 3)
        pool, inputs = convolution(weight, bias), [x, weight, bias]
    poisoned = x.masked_fill(~valid[:, None, :, None], torch.nan)
    one, other = pooled(poisoned, spans, pool, valid), looped(x, lengths, spans, weight, bias)
    torch.testing.assert_close(one, other)
    direction = torch.randn_like(other)
    gradients = [torch.autograd.grad(each, inputs, direction) for each in (one, other)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)
    for n, own, there in zip(lengths, range(3), spans_valid(valid, spans), strict=True):  # as a segment is alone
        alone = pooled(x[own : own + 1, :, :n], spans, pool)
        torch.testing.assert_close(one[own : own + 1, :, there], alone)


@each_spans
@pytest.mark.parametrize("length", [1, 2, 7, 12])
@pytest.mark.parametrize("radius", [None, 0, 4, 30])
def test_a_query_sees_spans_that_have_ended_and_lie_near(spans: Spans, length: int, radius: int | None) -> None:
    reach = length if radius is None else radius
    count = spans.count(length)
    for causal in (True, False):
        seen = spans_seen(spans, torch.arange(length), torch.arange(count), causal=causal, radius=radius)
        assert seen.shape == (length, count)
        for i in range(length):
            for s in range(count):
                positions = range(s * spans.stride, s * spans.stride + spans.size)
                near = radius is None or all(abs(i - position) <= reach for position in positions)
                assert seen[i, s].item() == (near and (not causal or positions[-1] <= i))
        if causal and radius is None:
            assert seen.sum(1).tolist() == [spans.closed(i + 1) for i in range(length)]


@each_spans
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 33, 131])
@pytest.mark.parametrize("radius", [0, 9, 200])
def test_lists_of_spans_are_what_is_seen(spans: Spans, causal: bool, length: int, radius: int) -> None:
    count = spans.count(length)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (length, count, count))
    lists = span_lists(spans, length, causal=causal, radius=radius, device=q.device)
    heads = attend_listed(q, k, v, None, lists, scale=0.5)
    seen = spans_seen(spans, torch.arange(length), torch.arange(count), causal=causal, radius=radius)
    torch.testing.assert_close(heads, safe_softmax(0.5 * q @ k.mT, seen) @ v)


def test_means_are_in_float32() -> None:
    ones = torch.ones(1, 1, 600, 1, dtype=torch.bfloat16)
    x = ones * torch.tensor([1.0, 3.0]).repeat(300).view(1, 1, 600, 1).bfloat16()
    assert pooled(x, Spans(600, 600), mean).item() == 2.0


def test_spans_side_by_side_are_not_copied() -> None:
    x = torch.randn(2, 3, 12, 4)
    assert span_rows(x, Spans(3, 3)).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("spans", [Spans(1, 1), Spans(3, 3), Spans(5, 4), Spans(4, 1), Spans(2, 3)], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_steps_make_the_summaries_of_spans_that_have_ended(spans: Spans, window: int | None) -> None:
    keys, values = torch.randn(2, 3, 2, 21, 4, dtype=torch.float64), torch.randn(2, 3, 2, 21, 5, dtype=torch.float64)
    weight, bias = torch.randn(2, spans.size, 4, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    pools = {"keys": convolution(weight, bias), "values": mean}
    state = start_spans(2, 3, keys, keys=(2, 4), values=(2, 5))
    order = torch.tensor([[2, 0, 0], [1, 1, 2]])
    for t in range(21):
        if t == 10:
            state = reorder(state, order)
            keys, values = (x.take_along_dim(order[:, :, None, None, None], 1) for x in (keys, values))
        state = append_row(state, spans, pools, window=window, keys=keys[:, :, :, t], values=values[:, :, :, t])
        ended, kept = spans.closed(t + 1), kept_spans(state, window)
        assert sorted(kept) == list(range(max(ended - (window or ended), 0), ended))
        for name, x in (("keys", keys), ("values", values)):
            whole = pooled(x.flatten(0, 1), spans, pools[name]).unflatten(0, (2, 3))
            torch.testing.assert_close(written(state["spans"], name, window=window), whole[:, :, :, kept])


@torch.no_grad()
def test_a_state_holds_one_span_of_rows_and_the_spans_that_may_be_seen() -> None:
    def sizes(state: State) -> list[torch.Size]:
        return [x.shape for part in state.values() for x in part.values() if isinstance(x, Tensor)]

    spans, x = Spans(9, 4), torch.randn(1, 2, 1, 200, 4)
    state, seen = start_spans(1, 2, x, keys=(1, 4)), []
    for t in range(200):
        state = append_row(state, spans, {"keys": mean}, window=11, keys=x[:, :, :, t])
        seen.append(sizes(state))
    assert seen[-1] == seen[100] == [(1, 2, 1, 9, 4), (1, 2, 1, 11, 4)]
