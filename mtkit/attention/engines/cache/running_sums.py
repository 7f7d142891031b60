"""Sums over the tokens so far, which replace a cache of the tokens in decoding."""

import torch
from torch import Tensor

from mtkit.attention.contract import State
from mtkit.attention.engines.softmax.dot_product import widened


def prefix_means(x: Tensor) -> Tensor:
    """Means (..., T, X) of x over each prefix, in float32 at least; padding on the right reaches no real position."""
    count = torch.arange(1, x.shape[-2] + 1, device=x.device).unsqueeze(-1)  # (T, 1)
    return widened(x).cumsum(-2) / count


def start_sums(*names: str) -> State:
    """Sums over no tokens, by name, and their "count"; the given rows state shapes and type."""
    return {**dict.fromkeys(names, 0.0), "count": 0}


def add_rows(state: State, **rows: Tensor) -> State:
    """The sums with the rows (B, N, ...) of one more token added, by name, in place and in float32 at least.

    The state keeps sums, not means, because a mean updated in place drifts.
    """
    after = {**state, "count": state["count"] + 1}
    for name, row in rows.items():
        after[name] = state[name].add_(row) if state["count"] else widened(row).clone()
    return after
