"""A window and a list of global keys for each segment, in one softmax; the keys are chosen by the marks of tokens."""

import torch
from torch import Tensor

from mtkit.attention.kernels.dot_product import attend

BLOCK = 64
"""Queries at a time, at least; with large windows as many as a window holds."""


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the chosen tokens (B, T) as a padded list (B, G), and which of its entries count.

    The other entries are positions of tokens that are not chosen; no position stands twice.
    """
    counts = chosen.sum(1)
    most = int(counts.max())  # on an accelerator this waits: the list is as long as the segment with most needs
    index = chosen.long().argsort(dim=1, descending=True, stable=True)[:, :most]
    return index, torch.arange(most, device=chosen.device) < counts.unsqueeze(1)


def at(x: Tensor, index: Tensor) -> Tensor:
    """Return rows (B, H, G, K) of x (B, H, T, K) at positions (B, G)."""
    return x.take_along_dim(index[:, None, :, None], 2)


def replace_rows(x: Tensor, rows: Tensor, index: Tensor, some: Tensor) -> Tensor:
    """Return x (B, H, T, K) with rows (B, H, G, K) at positions (B, G), if the entries count."""
    rows = rows.type_as(x).where(some[:, None, :, None], at(x, index))
    return x.scatter(2, index[:, None, :, None].expand_as(rows), rows)


def window_and_globals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    radius: int,
    dilation: int,
    scale: float,
    valid: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return the outputs (B, H, T, V) of softmaxes over a window and the chosen keys (B, T), each key counted once.

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V), valid (B, T); queries go through `attend` in blocks.
    """
    index, some = listed(chosen)
    global_k, global_v = at(k, index), at(v, index)
    length, reach = q.shape[2], radius * dilation
    position = torch.arange(length, device=q.device)
    near = ~chosen if valid is None else ~chosen & valid
    heads = []
    size = max(BLOCK, 2 * reach)
    for start in range(0, length, size):
        queries, keys = slice(start, start + size), slice(max(start - reach, 0), start + size + reach)
        distance = position[keys] - position[queries].unsqueeze(1)
        seen = (distance.abs() <= reach) & (distance % dilation == 0) & near[:, None, keys]
        seen = torch.cat([some.unsqueeze(1).expand(-1, seen.shape[1], -1), seen], 2)
        k_block, v_block = torch.cat([global_k, k[:, :, keys]], 2), torch.cat([global_v, v[:, :, keys]], 2)
        heads.append(attend(q[:, :, queries], k_block, v_block, scale=scale, valid=seen, dropout=dropout)[0])
    return torch.cat(heads, 2)
