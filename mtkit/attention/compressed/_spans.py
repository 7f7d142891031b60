"""Spans of neighbouring keys; a query sees one summary per span: a mean, a convolution, or one made by the mechanism.

Span s covers positions s * stride to s * stride + size - 1. The spans of a segment are all that begin before its end;
the last ones may reach beyond it, and padding never counts. A decoder may see a span from its last position on.

Spans of keys in decoding: a cache of the latest rows, and a summary of each span that has ended.

Each step writes one row. A step that ends a span also writes a summary of the `size` latest rows.
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
"""Summaries (B, G, P, V) of rows (B, G, P, size, K), of which those at `there` (B, 1, P, size) count, None: all."""


@dataclass(frozen=True)
class Spans:
    """Spans of `size` positions that begin `stride` positions apart."""

    size: int
    stride: int

    def count(self, length: int) -> int:
        """The number of spans that begin within the first `length` positions."""
        return -(-length // self.stride)

    def closed(self, length: int) -> int:
        """The number of spans that end within the first `length` positions."""
        return max((length - self.size) // self.stride + 1, 0)


def span_rows(x: Tensor, spans: Spans) -> Tensor:
    """The rows (..., P, size, K) of each span of x (..., T, K), zero beyond the end."""
    count = spans.count(x.shape[-2])
    beyond = (count - 1) * spans.stride + spans.size - x.shape[-2]
    if beyond > 0:
        x = F.pad(x, (0, 0, 0, beyond))
    return x.unfold(-2, spans.size, spans.stride)[..., :count, :, :].transpose(-1, -2)


def pooled(x: Tensor, spans: Spans, pool: Pool, valid: Tensor | None = None) -> Tensor:
    """The summaries (B, G, P, V) of x (B, G, T, K), of which the real rows at `valid` (B, T) count."""
    rows = span_rows(x, spans)
    there = x.new_ones(len(x), x.shape[-2], dtype=torch.bool) if valid is None else valid
    if valid is None and rows.shape[-3] == spans.closed(x.shape[-2]):
        return pool(rows, None)
    reached = span_rows(there.unsqueeze(-1).float(), spans).squeeze(-1) > 0
    return pool(rows, reached.unsqueeze(1))


def spans_valid(valid: Tensor, spans: Spans) -> Tensor:
    """Whether a real token lies in each span: (B, P) of (B, T), of segments padded on the right."""
    return valid[:, :: spans.stride]


def mean(rows: Tensor, there: Tensor | None = None) -> Tensor:
    """The mean over the rows that count, taken in float32 at least, in the type of the rows; zero if none counts."""
    if there is None:
        return upcast(rows).mean(-2).type_as(rows)
    total = upcast(rows).masked_fill(~there.unsqueeze(-1), 0.0).sum(-2)
    return (total / there.sum(-1, keepdim=True).clamp(min=1)).type_as(rows)


def convolution(weight: Tensor, bias: Tensor | None = None) -> Pool:
    """The sum over the places of a span of row times the matrix of its place; the kernel is per head or one for all.

    weight (G or 1, size, K, V), bias (G or 1, V) if any. Rows that do not count are taken as zero.
    """

    def pool(rows: Tensor, there: Tensor | None) -> Tensor:
        if there is not None:
            rows = rows.masked_fill(~there.unsqueeze(-1), 0.0)
        summed: Tensor = rows.flatten(-2) @ weight.flatten(1, 2)  # (B, G, P, size * K) with (G, size * K, V)
        return summed if bias is None else summed + bias.unsqueeze(-2).type_as(summed)

    return pool


def spans_seen(spans: Spans, position: Tensor, number: Tensor, *, causal: bool, radius: int | None = None) -> Tensor:
    """Whether queries at positions (..., T) see the spans of these numbers (..., P): (..., T, P).

    A causal query sees spans that have ended at or before its own position. With `radius`, a query sees spans whose
    positions all lie within this distance.
    """
    first, i = (number * spans.stride).unsqueeze(-2), position.unsqueeze(-1)
    last = first + spans.size - 1
    seen = (last <= i) | (not causal)
    return seen if radius is None else seen & (first >= i - radius) & (last <= i + radius)


def span_lists(spans: Spans, length: int, *, causal: bool, radius: int, device: torch.device) -> Lists:
    """The spans within `radius` beside each block of queries, for `attend_listed`: label 0 where seen, else 1."""
    count = spans.count(length)
    start = torch.arange(0, length, BLOCK, device=device).unsqueeze(-1)
    width = min((BLOCK - 1 + 2 * radius) // spans.stride + 2, count)
    first = (start - radius).div(spans.stride, rounding_mode="floor").clamp(0, count - width)
    number = first + torch.arange(width, device=device)  # (blocks, L)
    position = start + torch.arange(BLOCK, device=device)
    seen = spans_seen(spans, position, number, causal=causal, radius=radius)
    return Lists(number, (~seen).to(torch.uint8))


def start_spans(
    batch_size: int,
    hypotheses: int,
    like: Tensor,
    *,
    rows: Mapping[str, tuple[int, int]],
    summaries: Mapping[str, tuple[int, int]] | None = None,
) -> State:
    """The empty state: "rows" and "spans" are caches with a tensor of (heads, width) per name."""
    return {
        "rows": start_cache(batch_size, hypotheses, like, **rows),
        "spans": start_cache(batch_size, hypotheses, like, **(rows if summaries is None else summaries)),
    }


def append_row(
    state: State, spans: Spans, pools: Mapping[str, Pool], *, window: int | None = None, **rows: Tensor
) -> State:
    """The state with one more token: rows (B, N, G, K) by name, each pooled by the function of its name.

    With `window`, only that many latest spans are kept, as a ring (`step_cache`).
    """
    latest, ended = append(state["rows"], window=spans.size, first=0, **rows), state["spans"]
    count = latest["count"]
    if spans.closed(count) > spans.closed(count - 1):
        places = [ring_place(position, spans.size) for position in range(count - spans.size, count)]
        made = {}
        for name, pool in pools.items():
            cache: Tensor = latest[name]
            order = to_device(torch.tensor(places), cache.device)
            own = cache.flatten(0, 1).index_select(2, order).unsqueeze(2)  # (B*N, G, 1, size, K)
            made[name] = pool(own, None).squeeze(2).unflatten(0, cache.shape[:2])
        ended = append(ended, window=window, first=0, **made)
    return {**state, "rows": latest, "spans": ended}


def kept_spans(state: State, window: int | None = None) -> list[int]:
    """The numbers of the kept spans, in the order of their places in `written(state["spans"], name)`."""
    count = state["spans"]["count"]
    numbers = range(count) if window is None else range(max(count - window, 0), count)
    return sorted(numbers, key=lambda number: ring_place(number, window))
