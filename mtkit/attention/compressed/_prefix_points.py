"""Two nested attentions at every prefix: points read the tokens up to each position, and its query reads the points.

The result of the points at position t is one row per point, with all heads. These rows are never formed. Positions are
split into blocks. A point's result is the sum of all values before the block of t (one sum per block) and of the
block's values up to t, weighed by exponentials and divided by their sum up to t. The scores and the outputs of the
second attention are sums over heads of products with these two terms. The products take most of the time and are
computed for all positions of a block at once. The backward pass computes scores again, part by part.

The exponentials of a part are taken relative to one maximum, so that scores far below it become zero. If scores rise
too much within a part, each position has its own maximum; an accelerator always uses this form, because testing the
scores would make the host wait.

Shapes: G heads of queries, H heads of values; B segments of L blocks of c positions, N = H B L; m points.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.recurrence import Part, recur
from mtkit.attention.kernels.reproducible import seeded_dropout

BLOCK = 16
CHUNK = 256
FAR = 60.0
"""Largest rise of a part's scores above its first and all earlier ones, for which one maximum is enough."""

Noise = Callable[[Tensor], Tensor]


def read_points(
    q: Tensor, k: Tensor, v: Tensor, points: Tensor, keys: Tensor, values: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Return the heads' outputs (B, G, T, W) of queries (B, G, T, K), in at least float32; points and keys are scaled.

    points (H, m, K) are the queries of the first attention, over k (B, H, T, K) and v (B, H, T, V). The maps keys
    (G, K, H, V) and values (G, W, H, V) take the row of a point, which has all H heads, to each of the G heads.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0

    def step(
        part: Part, sequences: list[Tensor], constants: list[Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v = (upcast(x).squeeze(0) for x in sequences)
        points, keys, values = (upcast(x).squeeze(0) for x in constants)
        noise = seeded_dropout(dropout, seed + part.positions.start, q.device) if dropout else None
        recomputing = torch.is_grad_enabled() and not part.is_whole  # the backward pass needs no output
        earlier = [x.squeeze(0) for x in state]
        heads, state_after = _read(q, k @ points.unsqueeze(1).mT, v, keys, values, earlier, noise, recomputing)
        # in the layout of the layer's output, which saves a copy
        return heads.permute(1, 2, 0, 3).flatten(2).unsqueeze(0), [] if part.is_whole else [
            x.unsqueeze(0) for x in state_after
        ]

    # all segments are one stream, as they share the maps
    sequences, constants = ([x.unsqueeze(0) for x in tensors] for tensors in ((q, k, v), (points, keys, values)))
    like, shape = upcast(v), (1, v.shape[1], v.shape[0], 1, points.shape[1])
    empty = [like.new_full(shape, torch.finfo(like.dtype).min), like.new_zeros(shape)]
    empty.append(like.new_zeros(*shape, v.shape[-1]))
    heads, _ = recur(step, [x.transpose(1, 2) for x in sequences], empty, constants=constants, chunk=CHUNK)
    return heads.squeeze(0).unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def _read(
    q: Tensor,
    scores: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    state: list[Tensor],
    noise: Noise | None,
    recomputing: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the heads (G, B, T, W), given scores (H, B, T, m) of points, and the state after the part."""
    length, missing = scores.shape[2], -scores.shape[2] % BLOCK
    near = scores.device.type == "cpu" and _near(scores.detach(), state[0])
    if missing:
        q, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, v))
        scores = F.pad(scores, (0, 0, 0, missing), value=torch.finfo(scores.dtype).min)
    if near:
        heads, *state = _Part.apply(noise, recomputing, q, scores, v, keys, values, *state)  # type: ignore[no-untyped-call]
    else:
        heads, state = _read_far(q, scores, v, keys, values, state, noise)
    return heads[:, :, :length], state


def _near(scores: Tensor, top: Tensor) -> bool:
    """Return whether one maximum serves the part: no exponential that matters at some position underflows to zero."""
    return bool((scores.amax(2, keepdim=True) - top.maximum(scores[:, :, :1])).max() <= FAR)


def _read_far(
    q: Tensor, scores: Tensor, v: Tensor, keys: Tensor, values: Tensor, state: list[Tensor], noise: Noise | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute the function of `_Part` for any scores: each exponential is relative to the maximum up to a position.

    This takes exponentials for all position pairs in a block, and for all block pairs.
    """
    blocks, counted = scores.unflatten(2, (-1, BLOCK)), F.pad(v, (0, 1), value=1.0)  # sums of the ones are totals
    v_blocks = counted.unflatten(2, (-1, BLOCK))  # (H, B, L, c, V + 1)
    highest = blocks.detach().cummax(3).values  # (H, B, L, c, m)
    # the state and each block, and their sum before each block and after the last: L + 1 of both
    peaks = torch.cat([state[0].detach(), highest[:, :, :, -1]], 2)
    block_sums = (blocks - highest[:, :, :, -1:]).exp().mT @ v_blocks
    carried = torch.cat([state[2], state[1].unsqueeze(-1)], -1)
    block_sums = torch.cat([carried, block_sums], 2)  # (H, B, L + 1, m, V + 1)
    tops = peaks.cummax(2).values
    decay = (peaks.unsqueeze(2) - tops.unsqueeze(3)).masked_fill(_later(tops), -torch.inf).exp()
    sums = torch.einsum("hbkim,hbimv->hbkmv", decay, block_sums)
    # shares at each position: of the sum before its block, and of each value of its block
    first, summaries = tops[:, :, :-1].unsqueeze(3), sums[:, :, :-1]
    maxima = highest.maximum(first)
    pairs = (blocks.unsqueeze(3) - maxima.unsqueeze(4)).masked_fill(_later(blocks[0, 0]), -torch.inf).exp()
    lead = (first - maxima).exp()
    totals = pairs.sum(4) + lead * summaries[..., -1].unsqueeze(3)
    pairs, lead = pairs / totals.unsqueeze(4), (lead / totals).unsqueeze(4)  # (H, B, L, c, c, m), (H, B, L, c, 1, m)
    summaries, v_blocks = summaries[..., :-1], v_blocks[..., :-1]
    mapped_q = torch.einsum("gbtk,gkhv->hbtgv", q, keys).unflatten(2, (-1, BLOCK))  # (H, B, L, c, G, V)
    logits = torch.einsum("hbltgv,hblmv->hbltgm", mapped_q, summaries) * lead
    logits = logits + torch.einsum("hbltgv,hbljv->hbltgj", mapped_q, v_blocks) @ pairs
    weights = logits.sum(0).softmax(-1)  # (B, L, c, G, m)
    if noise is not None:
        weights = noise(weights.flatten(0, 2)).view_as(weights)
    read = torch.einsum("hbltgm,hblmv->hbltgv", weights * lead, summaries)
    read = read + torch.einsum("hbltgj,hbljv->hbltgv", weights @ pairs.mT, v_blocks)
    heads = torch.einsum("hbltgv,gwhv->gbltw", read, values).flatten(2, 3)
    return heads, [tops[:, :, -1:], sums[:, :, -1:, :, -1], sums[:, :, -1:, :, :-1]]


def _later(x: Tensor) -> Tensor:
    """Return which places (n, n, 1) of x (..., n, m) come after each place."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1).unsqueeze(-1)


class _Part(torch.autograd.Function):
    """Heads (G, B, T, W) of queries (G, B, T, K) and the state after a part, without autograd between its operations.

    The state is the largest score of each point so far, and the sums of exponentials and of values relative to it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        noise: Noise | None,
        recomputing: bool,
        q: Tensor,
        scores: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        top: Tensor,
        total: Tensor,
        sums: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        v_blocks = v.unflatten(2, (-1, BLOCK))
        peak = top.maximum(scores.amax(2, keepdim=True))
        factors, decay = (scores - peak).exp_(), (top - peak).exp_()  # (H, B, T, m), (H, B, 1, m)
        totals = factors.cumsum(2).add_(total * decay)
        block_sums = factors.unflatten(2, (-1, BLOCK)).mT @ v_blocks
        sums_before = _up_to(torch.cat([sums * decay.unsqueeze(-1), block_sums], 2))  # (H, B, L + 1, m, V)
        summaries = torch.cat([sums_before[:, :, :-1], v_blocks], 3).flatten(0, 2)  # (N, m + c, V)
        shares, factors_of = totals.reciprocal_().flatten(1, 2), factors.view(len(summaries), BLOCK, -1)
        mapped_q = _mapped(q, keys)
        products = mapped_q @ summaries.mT  # (N, c G, m + c)
        logits = _head_logits(products, factors_of, shares)
        weights = _in_rows(logits, shares).sum(0).softmax(-1)  # (B T, G, m)
        dropped = weights if noise is None else noise(weights)
        ctx.noisy, saved = noise is not None, (mapped_q, products, logits, weights, dropped)
        ctx.save_for_backward(q, v, keys, values, decay, factors_of, shares, summaries, *saved)
        ctx.mark_non_differentiable(peak)
        after = peak, shares.view_as(scores)[:, :, -1:].reciprocal(), sums_before[:, :, -1:]
        if recomputing:
            return q.new_empty(*q.shape[:3], values.shape[1]), *after
        read = _by_queries(_to_heads(dropped, factors_of, shares) @ summaries, len(q), len(v))
        return (read @ values.flatten(2).mT).view(*q.shape[:3], -1), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor, _: Tensor, d_total: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        q, v, keys, values, decay, factors, shares, summaries, *saved = ctx.saved_tensors
        mapped_q, products, logits, weights, dropped = saved
        groups, heads, points = len(q), len(v), factors.shape[2]
        # the second attention
        used, d_read = _to_heads(dropped, factors, shares), _mapped(d_heads, values)
        d_values = d_heads.flatten(1, 2).mT @ _by_queries(used @ summaries, groups, heads)
        d_used = d_read @ summaries.mT
        d_logits = _head_logits(d_used, factors, shares)
        d_weights = _in_rows(d_logits, shares).sum(0)
        if ctx.noisy:  # scale the gradient as dropout scaled the weights
            d_weights *= dropped / weights.clamp(min=torch.finfo(weights.dtype).tiny)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_products = _to_heads(d_scores, factors, shares)
        d_mapped_q = _by_queries(d_products @ summaries, groups, heads)
        d_summaries = torch.baddbmm(used.mT @ d_read, d_products.mT, mapped_q)
        # the first
        both = (_in_rows(logits, shares) * d_scores).addcmul_(_in_rows(d_logits, shares), dropped)
        d_totals = both.sum(2).mul_(shares).neg_().view(*v.shape[:3], points)
        d_totals[:, :, -1:] += d_total
        d_factors = products[..., points:].mT @ d_products[..., :points]
        d_factors = torch.baddbmm(d_factors, d_used[..., points:].mT, used[..., :points])
        d_before, d_v = d_summaries.view(*v.shape[:2], -1, points + BLOCK, v.shape[3]).split([points, BLOCK], 3)
        d_before = _up_to(torch.cat([d_before, d_sums], 2), backward=True)
        d_own, blocks = d_before[:, :, 1:].flatten(0, 2), v.reshape(len(factors), BLOCK, -1)
        d_factors = torch.baddbmm(d_factors, blocks, d_own.mT).view(*v.shape[:3], points)
        d_factors += d_totals.flip(2).cumsum(2).flip(2)
        return (
            None,
            None,
            (d_mapped_q @ keys.flatten(2).mT).view_as(q),
            d_factors.mul_(factors.view_as(d_factors)),
            (d_v.flatten(0, 2) + factors @ d_own).view_as(v),
            (q.flatten(1, 2).mT @ d_mapped_q).view_as(keys),
            d_values.view_as(values),
            None,
            d_totals.sum(2, keepdim=True) * decay,
            d_before[:, :, :1] * decay.unsqueeze(-1),
        )


def _mapped(x: Tensor, maps: Tensor) -> Tensor:
    """Return x (G, B, T, K) times maps (G, K, H, V) as rows (N, c G, V)."""
    rows = (x.flatten(1, 2) @ maps.flatten(2)).unflatten(2, maps.shape[2:])  # (G, B T, H, V)
    return rows.permute(2, 1, 0, 3).reshape(-1, BLOCK * len(x), maps.shape[3])


def _by_queries(rows: Tensor, groups: int, heads: int) -> Tensor:
    """Reshape rows (N, c G, V) to (G, B T, H V)."""
    return rows.view(heads, -1, groups, rows.shape[2]).permute(2, 1, 0, 3).flatten(2)


def _in_rows(x: Tensor, shares: Tensor) -> Tensor:
    """Reshape (N, c G, m), or shares themselves, to (H, B T, G or 1, m)."""
    return x.view(*shares.shape[:2], -1, shares.shape[2])


def _head_logits(products: Tensor, factors: Tensor, shares: Tensor) -> Tensor:
    """Return products (N, c G, m) with point rows, per head, given products (N, c G, m + c) with summaries.

    Products with later values become zero.
    """
    earlier, inside = products.split([factors.shape[2], BLOCK], 2)
    inside *= _seen(products)
    logits = torch.baddbmm(earlier, inside, factors)
    _in_rows(logits, shares).mul_(_in_rows(shares, shares))
    return logits


def _to_heads(x: Tensor, factors: Tensor, shares: Tensor) -> Tensor:
    """Return factors (N, c G, m + c) of summaries, given factors (B T, G, m) of point rows."""
    points = factors.shape[2]
    summary_factors = x.new_empty(len(factors), BLOCK * x.shape[1], points + BLOCK)
    undivided = summary_factors[..., :points]
    torch.mul(x, _in_rows(shares, shares), out=undivided.view(len(shares), *x.shape))
    torch.mul(undivided @ factors.mT, _seen(summary_factors), out=summary_factors[..., points:])
    return summary_factors


def _seen(rows: Tensor) -> Tensor:
    """Return which of a block's values each of its rows (-, c G, -) sees: ones and zeros (c G, c)."""
    return _triangle(rows, BLOCK).repeat_interleave(rows.shape[1] // BLOCK, 0)


def _up_to(x: Tensor, *, backward: bool = False) -> Tensor:
    """Return the sums of x (H, B, L, m, V) over all blocks up to each; backward: from each on."""
    triangle = _triangle(x, x.shape[2])
    return ((triangle.mT if backward else triangle) @ x.flatten(3)).view_as(x)


def _triangle(like: Tensor, size: int) -> Tensor:
    """Return ones on and below the diagonal, zeros above."""
    return like.new_ones(size, size).tril_()
