"""Spans of keys in decoding: a cache of the latest rows, and a summary of each span that has ended.

Each step writes one row. A step that ends a span also writes a summary of the `size` latest rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtkit.attention.contract import State
from mtkit.attention.engines.blocks.spans import Pool, Spans
from mtkit.attention.engines.cache.step_cache import append, ring_place, start_cache
from mtkit.device import to_device


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
