"""Blocks of rows in a soft order: weights that are nearly a permutation (Sinkhorn), and rows mixed by them.

Block n covers positions n * size to (n + 1) * size - 1, the last one what is left. Weights are (B, H, P, N): row p
mixes the N blocks into the one at place p.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import safe_softmax, upcast, weighted

HIDDEN = -1e30
"""Log of what is not there: finite, so that sums of nothing but such entries have no NaN."""
LEAST = 1e-6
"""Share of a slot below which nothing is there."""


def order_weights(scores: Tensor, visible: Tensor | None, iterations: int, *, causal: bool) -> Tensor:
    """The weights (B, H, N, N), in float32 at least, of scores (B, H, N, N), None visible meaning all.

    Each iteration divides the exponentials by their sums over rows, then over columns; at last rows are divided again.
    If `causal`, the sum of a column that row n is divided by is that of rows 0 to n. A row that sees nothing is zero.
    """

    def shown(x: Tensor) -> Tensor:
        return x if visible is None else x.where(visible, HIDDEN)

    logs = shown(upcast(scores))
    for _ in range(iterations):
        logs = shown(logs - logs.logsumexp(-1, keepdim=True))
        logs = shown(logs - (logs.logcumsumexp(-2) if causal else logs.logsumexp(-2, keepdim=True)))
    return safe_softmax(logs, visible)


def next_order_weights(scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """One more row of causal `order_weights`: its weights (B, H, N) from scores (B, H, N), and the columns after it.

    The columns (B, H, iterations, N - 1) are the logs of the sums over the rows before, in each iteration.
    """
    logs, after = upcast(scores), []
    for before in F.pad(columns, (0, 1), value=HIDDEN).unbind(2):
        logs = logs - logs.logsumexp(-1, keepdim=True)
        after.append(torch.logaddexp(before, logs))
        logs = logs - after[-1]
    return logs.softmax(-1), torch.stack(after, 2) if after else columns


def block_rows(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The rows (B, G, N, size, V) of each block of x (B, G, T, V), zero behind the end and where not valid (B, T)."""
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0.0)
    fill = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, size))


def block_sums(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The sum (B, G, N, V) over each block, in float32 at least."""
    return upcast(block_rows(x, size, valid)).sum(-2)


def block_means(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The mean (B, G, N, V) over the real rows of each block, in float32 at least; zero if there are none."""
    there = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    return block_sums(x, size, valid) / block_sums(upcast(there[:, None, :, None].type_as(x)), size).clamp(min=1)


def sums_to_blocks(x: Tensor, size: int) -> Tensor:
    """The sum (B, G, N, V) over all positions up to the first of each block, itself included."""
    rows = upcast(block_rows(x, size))
    # the blocks before, not all less the own one, which would leave rounding
    before = F.pad(rows[:, :, :-1].sum(-2).cumsum(2), (0, 0, 1, 0))
    return before + rows[..., 0, :]


def sorted_rows(weights: Tensor, x: Tensor, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The blocks (B, H, P, size, V) that `weights` mix from x (B, G, T, V), slot by slot over the blocks that have it.

    The mask (B, H, P, size) of slots that any block with a weight has; None where all have all.
    """
    mixed = weighted(weights, block_rows(x, size, valid).flatten(3)).unflatten(3, (size, -1))
    if valid is None and x.shape[2] % size == 0:
        return mixed, None
    there = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    slots = block_rows(there[:, None, :, None].type_as(weights), size).squeeze(-1)  # (B or 1, 1, N, size)
    with torch.autocast(x.device.type, enabled=False):
        share = weights @ slots
    return (mixed / share.clamp(min=LEAST).unsqueeze(-1)).type_as(mixed), share >= LEAST
