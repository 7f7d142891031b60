"""Inputs without segments, without tokens, or without a memory to attend to.

A mechanism never sees them. Each is given a row of padding in the place of what is missing, and what comes of that row
is cut off the result. A memory without tokens is then a memory of padding, for which every mechanism gives zero before
`out_proj`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.errors import MtkitError


def with_padding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a mechanism that also takes B = 0, T = 0 and S = 0.

    A carry stays that of the padded inputs: the attention of the next layer reads it beside inputs that are padded in
    the same way. Losses are zero where there is no token.
    """

    @wraps(forward)
    def whole(self: Any, query: Tensor, *rest: Tensor | None, **given: Any) -> Any:
        memory = rest[0] if rest else given.get("memory")
        if query.shape[0] and query.shape[1] and (memory is None or memory.shape[1]):
            return forward(self, query, *rest, **given)
        (batch, length), keys = query.shape[:2], (query if memory is None else memory).shape[1]
        query, given["query_valid"] = _padded(query, given.get("query_valid"))
        if memory is not None:
            given["memory"], given["memory_valid"] = _padded(memory, given.get("memory_valid"))
        if given.get("task") is not None:
            given["task"] = F.pad(given["task"], (0, len(query) - batch))
        attended = forward(self, query, **given)
        attended.output = attended.output[:batch, :length]
        if attended.weights is not None:
            attended.weights = attended.weights[:batch, :, :length, :keys]
        if attended.log_prob is not None:
            attended.log_prob = attended.log_prob[:batch]
        if not (batch and length):
            attended.losses = {name: 0.0 * loss for name, loss in attended.losses.items()}
        return attended

    return whole


def with_padded_memory(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start` of a mechanism that also takes S = 0. Raises: MtkitError for no segment or no hypothesis."""

    @wraps(start)
    def whole(
        self: Any,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        **given: Any,
    ) -> Any:
        for name, count in (("batch_size", batch_size), ("hypotheses", hypotheses)):
            if count < 1:
                raise MtkitError(f"{name} = {count} must be at least 1 to start decoding")
        if memory is not None and not memory.shape[1]:
            memory, memory_valid = _padded(memory, memory_valid)
        return start(self, batch_size, memory, memory_valid, hypotheses=hypotheses, **given)

    return whole


def _padded(tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T, D) with one row of padding for each axis of size 0, and which of them are real, (B, T)."""
    batch, length = tokens.shape[:2]
    if batch and length:
        return tokens, valid
    more = (0, 1 - min(length, 1), 0, 1 - min(batch, 1))
    real = torch.ones(batch, length, dtype=torch.bool, device=tokens.device) if valid is None else valid
    return F.pad(tokens, (0, 0, *more)), F.pad(real, more)
