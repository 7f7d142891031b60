"""Spans of neighbouring keys, with one summary per span: a mean, a convolution, or a function of the mechanism.

Span s covers positions s * stride to s * stride + size - 1. A segment has all spans that begin before its end; the last
ones may extend beyond it, and padding never counts. A decoder may see a span from its last position on.

In decoding, each step writes one row to a cache of the latest `size` rows; a step that ends a span also writes the
summary of these rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, ring_place, start_cache
from mtkit.attention.contract import State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.listed import Lists
from mtkit.device import to_device

BLOCK = 32
"""Queries that share a list of spans."""

Pool = Callable[[Tensor, Tensor | None], Tensor]
"""Function from rows (B, G, P, size, K) to summaries (B, G, P, V); of the rows, those in the mask (B, 1, P, size)
count,
None: all."""


@dataclass(frozen=True)
class Spans:
    """Spans of `size` positions that begin `stride` positions apart."""

    size: int
    stride: int

    def count(self, length: int) -> int:
        """Return the number of spans that begin within the first `length` positions."""
        return -(-length // self.stride)

    def closed(self, length: int) -> int:
        """Return the number of spans that end within the first `length` positions."""
        return max((length - self.size) // self.stride + 1, 0)


def span_rows(x: Tensor, spans: Spans) -> Tensor:
    """Return the rows (..., P, size, K) of each span of x (..., T, K), zero beyond the end."""
    count = spans.count(x.shape[-2])
    beyond = (count - 1) * spans.stride + spans.size - x.shape[-2]
    if beyond > 0:
        x = F.pad(x, (0, 0, 0, beyond))
    return x.unfold(-2, spans.size, spans.stride)[..., :count, :, :].transpose(-1, -2)


def pooled(x: Tensor, spans: Spans, pool: Pool, valid: Tensor | None = None) -> Tensor:
    """Return the summaries (B, G, P, V) of the spans of x (B, G, T, K); only the real rows in `valid` (B, T) count."""
    rows = span_rows(x, spans)
    mask = x.new_ones(len(x), x.shape[-2], dtype=torch.bool) if valid is None else valid
    if valid is None and rows.shape[-3] == spans.closed(x.shape[-2]):
        return pool(rows, None)
    counted = span_rows(mask.unsqueeze(-1).float(), spans).squeeze(-1) > 0
    return pool(rows, counted.unsqueeze(1))


def spans_valid(valid: Tensor, spans: Spans) -> Tensor:
    """Return whether each span holds a real token, (B, P), for segments padded on the right."""
    return valid[:, :: spans.stride]


def mean(rows: Tensor, there: Tensor | None = None) -> Tensor:
    """Return the mean of the rows that count, computed in at least float32, in the rows' type; zero if none counts."""
    if there is None:
        return upcast(rows).mean(-2).type_as(rows)
    total = upcast(rows).masked_fill(~there.unsqueeze(-1), 0.0).sum(-2)
    return (total / there.sum(-1, keepdim=True).clamp(min=1)).type_as(rows)


def span_means(x: Tensor, spans: Spans) -> Tensor:
    """Return the means (..., P, K) of the complete spans of x (..., T, K), whose size is a multiple of the stride.

    They are sums of strides: the gradient of overlapping views would be added up number by number.
    """
    count, inside = spans.closed(x.shape[-2]), spans.size // spans.stride
    strides = upcast(x)[..., : (count + inside - 1) * spans.stride, :].unflatten(-2, (-1, spans.stride)).sum(-2)
    total = strides[..., :count, :]
    for other in range(1, inside):
        total = total + strides[..., other : other + count, :]
    return (total / spans.size).type_as(x)


def convolution(weight: Tensor, bias: Tensor | None = None) -> Pool:
    """Return a pool that sums, over the places of a span, the row times that place's matrix; rows that do not count are
    zero.

    weight (G or 1, size, K, V), per head or for all; bias (G or 1, V).
    """

    def pool(rows: Tensor, there: Tensor | None) -> Tensor:
        if there is not None:
            rows = rows.masked_fill(~there.unsqueeze(-1), 0.0)
        total: Tensor = rows.flatten(-2) @ weight.flatten(1, 2)  # (B, G, P, size * K) with (G, size * K, V)
        return total if bias is None else total + bias.unsqueeze(-2).type_as(total)

    return pool


def spans_seen(spans: Spans, position: Tensor, number: Tensor, *, causal: bool, radius: int | None = None) -> Tensor:
    """Return whether queries at positions (..., T) see the spans with these numbers (..., P): (..., T, P).

    A causal query sees spans that have ended at or before its own position. With `radius`, a query sees spans whose
    positions all lie within this distance.
    """
    first, i = (number * spans.stride).unsqueeze(-2), position.unsqueeze(-1)
    last = first + spans.size - 1
    seen = (last <= i) | (not causal)
    return seen if radius is None else seen & (first >= i - radius) & (last <= i + radius)


def span_lists(spans: Spans, length: int, *, causal: bool, radius: int, device: torch.device) -> Lists:
    """Return, for `attend_listed`, the spans within `radius` of each query block; label 0 if a query sees a span,
    else 1.
    """
    count = spans.count(length)
    start = torch.arange(0, length, BLOCK, device=device).unsqueeze(-1)
    width = min((BLOCK - 1 + 2 * radius) // spans.stride + 2, count)
    first = (start - radius).div(spans.stride, rounding_mode="floor").clamp(0, count - width)
    number = first + torch.arange(width, device=device)  # (blocks, L)
    position = start + torch.arange(BLOCK, device=device)
    seen = spans_seen(spans, position, number, causal=causal, radius=radius)
    return Lists(number, (~seen).to(torch.uint8))


def start_spans(batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
    """Return the empty state: caches "rows" and "spans" with a tensor of (heads, width) per name."""
    return {name: start_cache(batch_size, hypotheses, like, **shapes) for name in ("rows", "spans")}


def append_row(
    state: State, spans: Spans, pools: Mapping[str, Pool], *, window: int | None = None, **rows: Tensor
) -> State:
    """Return the state with one more token: rows (B, N, G, K) by name, each pooled by the function with its name.

    With `window`, only the latest `window` spans are kept, as a ring (`step_cache`).
    """
    latest, ended = append(state["rows"], window=spans.size, first=0, **rows), state["spans"]
    count = latest["count"]
    if spans.closed(count) > spans.closed(count - 1):
        places = [ring_place(position, spans.size) for position in range(count - spans.size, count)]
        summaries = {}
        for name, pool in pools.items():
            cache: Tensor = latest[name]
            order = to_device(torch.tensor(places), cache.device)
            latest_rows = cache.flatten(0, 1).index_select(2, order).unsqueeze(2)  # (B*N, G, 1, size, K)
            summaries[name] = pool(latest_rows, None).squeeze(2).unflatten(0, cache.shape[:2])
        ended = append(ended, window=window, first=0, **summaries)
    return {**state, "rows": latest, "spans": ended}


def kept_spans(state: State, window: int | None = None) -> list[int]:
    """Return the numbers of the kept spans, in the order of `written(state["spans"], name)`."""
    count = state["spans"]["count"]
    numbers = range(count) if window is None else range(max(count - window, 0), count)
    return sorted(numbers, key=lambda number: ring_place(number, window))
