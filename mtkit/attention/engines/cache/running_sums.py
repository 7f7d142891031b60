"""Sums over the tokens so far, in place of a cache of them, for decoding."""

import torch
from torch import Tensor

from mtkit.attention.contract import State
from mtkit.attention.engines.softmax.dot_product import widened


def prefix_means(x: Tensor) -> Tensor:
    """Means (..., T, X) of x over each prefix, in float32 at least; padding on the right reaches no real position."""
    count = torch.arange(1, x.shape[-2] + 1, device=x.device).unsqueeze(-1)  # (T, 1)
    return widened(x).cumsum(-2) / count


def start_sums(*names: str) -> State:
    """Sums over no tokens, by name, and their "count"; the first rows show their shapes and type."""
    return {**dict.fromkeys(names, 0.0), "count": 0}


def add_rows(state: State, **rows: Tensor) -> State:
    """The sums with one more token's rows (B, N, ...), by name: in place, in float32 at least.

    Sums are kept and not means: a mean updated in place drifts.
    """
    after = {**state, "count": state["count"] + 1}
    for name, row in rows.items():
        after[name] = state[name].add_(row) if state["count"] else widened(row).clone()
    return after
