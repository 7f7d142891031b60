"""Two attentions, one above the other, at every prefix: points read the tokens up to each, which reads the points.

What a point has read up to token t enters the second attention as one row of all heads. These rows are never formed.
Positions lie in blocks. What a point has read is the sum of all values before the block of t, of which there is one for
a block, and of the block's values up to t, weighed by exponentials and divided by their sum up to t. A score of the
second attention, and what it reads, are sums over heads of products with the one and the other: these take most of
the time, and are of all positions of a block at once. The backward pass computes scores again, part by part.

Exponentials of a part have one maximum, and those far below it become zeros. If scores rise that far, each position of
the part has a maximum of its own; an accelerator takes this form always, because a test of scores makes the host wait.

Shapes: G heads of queries, H of values; B segments of L blocks of c positions, N = H B L; m points.
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
"""How far scores of a part may lie above its first and all before it: exponentials below one maximum become zeros."""

Noise = Callable[[Tensor], Tensor]


def read_points(
    q: Tensor, k: Tensor, v: Tensor, points: Tensor, keys: Tensor, values: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """The heads' outputs (B, G, T, W) of queries (B, G, T, K), in float32 at least; points and keys are scaled.

    points (H, m, K) ask the tokens, k (B, H, T, K) and v (B, H, T, V). The maps keys (G, K, H, V) and values
    (G, W, H, V) are of each head of the queries, from the row of a point, which is of all H heads.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0

    def step(
        part: Part, sequences: list[Tensor], constants: list[Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v = (upcast(x).squeeze(0) for x in sequences)
        points, keys, values = (upcast(x).squeeze(0) for x in constants)
        noise = seeded_dropout(dropout, seed + part.positions.start, q.device) if dropout else None
        again = torch.is_grad_enabled() and not part.whole  # the backward pass asks for no output
        before = [x.squeeze(0) for x in state]
        heads, after = _read(q, k @ points.unsqueeze(1).mT, v, keys, values, before, noise, again)
        # as the layer wants them, so that they are not copied once more
        return heads.permute(1, 2, 0, 3).flatten(2).unsqueeze(0), [] if part.whole else [x.unsqueeze(0) for x in after]

    # all segments are one stream, as they share the maps
    sequences, constants = ([x.unsqueeze(0) for x in each] for each in ((q, k, v), (points, keys, values)))
    like, shape = upcast(v), (1, v.shape[1], v.shape[0], 1, points.shape[1])
    nothing = [like.new_full(shape, torch.finfo(like.dtype).min), like.new_zeros(shape)]
    nothing.append(like.new_zeros(*shape, v.shape[-1]))
    heads, _ = recur(step, [x.transpose(1, 2) for x in sequences], nothing, constants=constants, chunk=CHUNK)
    return heads.squeeze(0).unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def _read(
    q: Tensor,
    scores: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    state: list[Tensor],
    noise: Noise | None,
    again: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The heads (G, B, T, W), from scores (H, B, T, m) of points, and the state after."""
    length, missing = scores.shape[2], -scores.shape[2] % BLOCK
    near = scores.device.type == "cpu" and _near(scores.detach(), state[0])
    if missing:
        q, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, v))
        scores = F.pad(scores, (0, 0, 0, missing), value=torch.finfo(scores.dtype).min)
    if near:
        heads, *state = _Part.apply(noise, again, q, scores, v, keys, values, *state)  # type: ignore[no-untyped-call]
    else:
        heads, state = _read_far(q, scores, v, keys, values, state, noise)
    return heads[:, :, :length], state


def _near(scores: Tensor, top: Tensor) -> bool:
    """Whether no exponential of a part below its one maximum becomes zero that counts at some position."""
    return bool((scores.amax(2, keepdim=True) - top.maximum(scores[:, :, :1])).max() <= FAR)


def _read_far(
    q: Tensor, scores: Tensor, v: Tensor, keys: Tensor, values: Tensor, state: list[Tensor], noise: Noise | None
) -> tuple[Tensor, list[Tensor]]:
    """What `_Part` computes, for scores however far apart: each exponential is below the maximum up to a position.

    It takes exponentials of all pairs of positions in a block, and of all pairs of blocks.
    """
    blocks, counted = scores.unflatten(2, (-1, BLOCK)), F.pad(v, (0, 1), value=1.0)  # sums of the ones are totals
    v_blocks = counted.unflatten(2, (-1, BLOCK))  # (H, B, L, c, V + 1)
    highest = blocks.detach().cummax(3).values  # (H, B, L, c, m)
    # the state and each block, and their sum before each block and after the last: L + 1 of both
    peaks = torch.cat([state[0].detach(), highest[:, :, :, -1]], 2)
    own = (blocks - highest[:, :, :, -1:]).exp().mT @ v_blocks
    own = torch.cat([torch.cat([state[2], state[1].unsqueeze(-1)], -1), own], 2)  # (H, B, L + 1, m, V + 1)
    tops = peaks.cummax(2).values
    less = (peaks.unsqueeze(2) - tops.unsqueeze(3)).masked_fill(_later(tops), -torch.inf).exp()
    before = torch.einsum("hbkim,hbimv->hbkmv", less, own)
    # shares at each position: of the sum before its block, and of each value of its block
    first, summaries = tops[:, :, :-1].unsqueeze(3), before[:, :, :-1]
    tops_at = highest.maximum(first)
    pairs = (blocks.unsqueeze(3) - tops_at.unsqueeze(4)).masked_fill(_later(blocks[0, 0]), -torch.inf).exp()
    lead = (first - tops_at).exp()
    totals = pairs.sum(4) + lead * summaries[..., -1].unsqueeze(3)
    pairs, lead = pairs / totals.unsqueeze(4), (lead / totals).unsqueeze(4)  # (H, B, L, c, c, m), (H, B, L, c, 1, m)
    summaries, v_blocks = summaries[..., :-1], v_blocks[..., :-1]
    asks = torch.einsum("gbtk,gkhv->hbtgv", q, keys).unflatten(2, (-1, BLOCK))  # (H, B, L, c, G, V)
    met = torch.einsum("hbltgv,hblmv->hbltgm", asks, summaries) * lead
    met = met + torch.einsum("hbltgv,hbljv->hbltgj", asks, v_blocks) @ pairs
    answers = met.sum(0).softmax(-1)  # (B, L, c, G, m)
    if noise is not None:
        answers = noise(answers.flatten(0, 2)).view_as(answers)
    read = torch.einsum("hbltgm,hblmv->hbltgv", answers * lead, summaries)
    read = read + torch.einsum("hbltgj,hbljv->hbltgv", answers @ pairs.mT, v_blocks)
    heads = torch.einsum("hbltgv,gwhv->gbltw", read, values).flatten(2, 3)
    return heads, [tops[:, :, -1:], before[:, :, -1:, :, -1], before[:, :, -1:, :, :-1]]


def _later(x: Tensor) -> Tensor:
    """Which places (n, n, 1) of x (..., n, m) come after each place."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1).unsqueeze(-1)


class _Part(torch.autograd.Function):
    """Heads (G, B, T, W) of queries (G, B, T, K) and the state after a part, without autograd between its operations.

    The state is the greatest score of each point so far, and the sums of exponentials and of values below it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        noise: Noise | None,
        again: bool,
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
        factors, less = (scores - peak).exp_(), (top - peak).exp_()  # (H, B, T, m), (H, B, 1, m)
        totals = factors.cumsum(2).add_(total * less)
        own = factors.unflatten(2, (-1, BLOCK)).mT @ v_blocks
        before = _up_to(torch.cat([sums * less.unsqueeze(-1), own], 2))  # (H, B, L + 1, m, V)
        summaries = torch.cat([before[:, :, :-1], v_blocks], 3).flatten(0, 2)  # (N, m + c, V)
        shares, factors_of = totals.reciprocal_().flatten(1, 2), factors.view(len(summaries), BLOCK, -1)
        asks = _mapped(q, keys)
        products = asks @ summaries.mT  # (N, c G, m + c)
        met = _met(products, factors_of, shares)
        answers = _in_rows(met, shares).sum(0).softmax(-1)  # (B T, G, m)
        noisy = answers if noise is None else noise(answers)
        ctx.noisy, made = noise is not None, (asks, products, met, answers, noisy)
        ctx.save_for_backward(q, v, keys, values, less, factors_of, shares, summaries, *made)
        ctx.mark_non_differentiable(peak)
        after = peak, shares.view_as(scores)[:, :, -1:].reciprocal(), before[:, :, -1:]
        if again:
            return q.new_empty(*q.shape[:3], values.shape[1]), *after
        read = _by_queries(_to_heads(noisy, factors_of, shares) @ summaries, len(q), len(v))
        return (read @ values.flatten(2).mT).view(*q.shape[:3], -1), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor, _: Tensor, d_total: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        q, v, keys, values, less, factors, shares, summaries, *made = ctx.saved_tensors
        asks, products, met, answers, noisy = made
        groups, heads, points = len(q), len(v), factors.shape[2]
        # the second attention
        used, d_read = _to_heads(noisy, factors, shares), _mapped(d_heads, values)
        d_values = d_heads.flatten(1, 2).mT @ _by_queries(used @ summaries, groups, heads)
        d_used = d_read @ summaries.mT
        d_met = _met(d_used, factors, shares)
        d_answers = _in_rows(d_met, shares).sum(0)
        if ctx.noisy:  # what dropout did to the answers, it does to their gradient
            d_answers *= noisy / answers.clamp(min=torch.finfo(answers.dtype).tiny)
        d_scores = answers * (d_answers - (answers * d_answers).sum(-1, keepdim=True))
        d_products = _to_heads(d_scores, factors, shares)
        d_asks = _by_queries(d_products @ summaries, groups, heads)
        d_summaries = torch.baddbmm(used.mT @ d_read, d_products.mT, asks)
        # the first
        both = (_in_rows(met, shares) * d_scores).addcmul_(_in_rows(d_met, shares), noisy)
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
            (d_asks @ keys.flatten(2).mT).view_as(q),
            d_factors.mul_(factors.view_as(d_factors)),
            (d_v.flatten(0, 2) + factors @ d_own).view_as(v),
            (q.flatten(1, 2).mT @ d_asks).view_as(keys),
            d_values.view_as(values),
            None,
            d_totals.sum(2, keepdim=True) * less,
            d_before[:, :, :1] * less.unsqueeze(-1),
        )


def _mapped(x: Tensor, maps: Tensor) -> Tensor:
    """(G, B, T, K) by maps (G, K, H, V) as rows (N, c G, V)."""
    rows = (x.flatten(1, 2) @ maps.flatten(2)).unflatten(2, maps.shape[2:])  # (G, B T, H, V)
    return rows.permute(2, 1, 0, 3).reshape(-1, BLOCK * len(x), maps.shape[3])


def _by_queries(rows: Tensor, groups: int, heads: int) -> Tensor:
    """Rows (N, c G, V) as (G, B T, H V)."""
    return rows.view(heads, -1, groups, rows.shape[2]).permute(2, 1, 0, 3).flatten(2)


def _in_rows(x: Tensor, shares: Tensor) -> Tensor:
    """(N, c G, m), or shares themselves, as (H, B T, G or 1, m)."""
    return x.view(*shares.shape[:2], -1, shares.shape[2])


def _met(products: Tensor, factors: Tensor, shares: Tensor) -> Tensor:
    """Products (N, c G, m + c) with summaries as products (N, c G, m) with rows, head by head.

    Those with values that come later become zero.
    """
    earlier, inside = products.split([factors.shape[2], BLOCK], 2)
    inside *= _seen(products)
    met = torch.baddbmm(earlier, inside, factors)
    _in_rows(met, shares).mul_(_in_rows(shares, shares))
    return met


def _to_heads(x: Tensor, factors: Tensor, shares: Tensor) -> Tensor:
    """Factors (B T, G, m) of rows as factors (N, c G, m + c) of summaries."""
    points = factors.shape[2]
    found = x.new_empty(len(factors), BLOCK * x.shape[1], points + BLOCK)
    undivided = found[..., :points]
    torch.mul(x, _in_rows(shares, shares), out=undivided.view(len(shares), *x.shape))
    torch.mul(undivided @ factors.mT, _seen(found), out=found[..., points:])
    return found


def _seen(rows: Tensor) -> Tensor:
    """Which of a block's values each of its rows (-, c G, -) sees: ones and zeros (c G, c)."""
    return _triangle(rows, BLOCK).repeat_interleave(rows.shape[1] // BLOCK, 0)


def _up_to(x: Tensor, *, backward: bool = False) -> Tensor:
    """Sums of x (H, B, L, m, V) over all blocks up to each, or from each on."""
    triangle = _triangle(x, x.shape[2])
    return ((triangle.mT if backward else triangle) @ x.flatten(3)).view_as(x)


def _triangle(like: Tensor, size: int) -> Tensor:
    """Ones on and below the diagonal."""
    return like.new_ones(size, size).tril_()
