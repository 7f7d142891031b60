"""Softmax attention over any sparse position pattern, in blocks, each key counted once, without a T x T tensor.

Each block of queries is laid out next to the keys it may see (`pattern_blocks`); one fused softmax runs over a group of
blocks. Members of a pattern that need another layout (another dilation, a comb, random keys) form their own part,
which omits keys that earlier parts have seen; the parts' softmaxes are joined by their log-sum-exp. If all members see
whole blocks of one size, some of them picked, no parts are needed (`picked_blocks`).
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import (
    attend,
    attend_visible,
    expand_heads,
    is_plain,
    placed,
    scores_of,
    weigh,
    weighted,
)
from mtkit.attention.kernels.flash.parts import KernelRows, Laid, LaidPart, attend_parts, can_fuse
from mtkit.attention.kernels.flash.windows import attend_windows, windows_are_faster
from mtkit.attention.kernels.fused import fused_attention
from mtkit.attention.kernels.grid import Grid, grid_lists
from mtkit.attention.kernels.listed import attend_listed
from mtkit.attention.kernels.pattern import Band, Columns, Comb, Pattern, Rows, Union, Window
from mtkit.attention.kernels.pattern_blocks import CombLayout, Fold, QueryBlocks, WindowLayout, surely_all
from mtkit.attention.kernels.picked_blocks import attend_picked, block_size, picks_of
from mtkit.attention.kernels.random_pattern import Drawn, DrawnLayout, LastRows
from mtkit.attention.kernels.running_softmax import join_parts, softmax_with_sum
from mtkit.attention.kernels.tiled_softmax import attend_biased
from mtkit.attention.slots import Positions

Layout = WindowLayout | CombLayout | DrawnLayout
Part = tuple[Layout, Callable[[Tensor, Tensor, Tensor], list[QueryBlocks]]]
"""A layout, and the function that lays out queries, keys and values."""


class How(NamedTuple):
    """Arguments of `sparse_attend` that all its forms read."""

    scale: float
    causal: bool
    valid: Tensor | None
    positions: Positions | None
    dropout: float


def sparse_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    positions: Positions | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The result of `attend` if each query sees only the keys of the pattern.

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V), G and G' divide H; valid (B, T), padding on the right. Weights
    (B, H, T, T) are formed only on request. A pattern of only random members may draw the keys of another sequence,
    (B, G, S, K) with valid (B, S). Relative positions do not combine with a grid, which unites with no
    other pattern, or with last rows, which are not causal.
    """
    how = How(scale, causal, valid, positions, dropout)
    if pattern.covers(k.shape[2], causal):
        return attend(q, k, v, need_weights=need_weights, **how._asdict())
    if need_weights:
        return dense_attend(q, k, v, _visible(q, k, pattern, how), scale, positions, dropout)
    if isinstance(pattern, Grid):
        return _attend_grid(q, k, v, pattern, how), None
    if positions is None and isinstance(pattern, Band) and pattern.dilation > 1:
        length = -(-q.shape[2] // pattern.dilation)
        if Band(pattern.back, pattern.ahead).covers(length, causal):
            return _attend_streams(q, k, v, pattern.dilation, how), None
    if is_plain(positions):
        how = how._replace(positions=None)
    shown, size = how._replace(valid=None if causal else valid), block_size(pattern)
    if how.positions is None and size:
        blocks = torch.arange(-(-q.shape[2] // size), device=q.device)
        picks = picks_of(pattern, size, blocks, -(-k.shape[2] // size), causal)
        if picks.shape[-1] * size >= k.shape[2]:  # the picked blocks hold more keys than there are
            return attend_visible(q, k, v, _visible(q, k, pattern, how), None, scale=scale, dropout=dropout), None
        heads = attend_picked(q, k, v, picks, size, scale=scale, causal=causal, valid=shown.valid, dropout=dropout)
    else:
        heads = _attend_parts(q, k, v, pattern, shown)
    return _with_rows(heads, q, k, v, pattern, how), None


def _visible(q: Tensor, k: Tensor, pattern: Pattern, how: How) -> Tensor:
    """Return a mask of the keys that each query sees by the pattern, broadcastable to (B, H, T, T)."""
    i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return visible_pairs(pattern.mask(i.unsqueeze(-1), j), how.causal, how.valid)


def visible_pairs(seen: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
    """A mask broadcastable to (B, H, T, T): the pairs that a pattern sees, (..., T, T), without future or padding."""
    if causal:
        return seen.tril()
    return seen if valid is None else seen & valid[:, None, None, :]


def dense_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    positions: Positions | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs and the weights (B, H, T, S), computed from all scores under a mask."""
    scores = scores_of(q, k, scale)
    return weigh(scores, q, v, placed(positions, q, k), scale=scale, visible=visible, dropout=dropout)


def _attend_grid(q: Tensor, k: Tensor, v: Tensor, grid: Grid, how: How) -> Tensor:
    """The heads' outputs; a rectangle of queries attends to a rectangle of keys, whose numbers are listed.

    The backward pass computes the weights again: kept for it, they would take twenty times the memory of `full`.
    """
    layout, lists = grid_lists(grid, q.shape[2], how.causal, q.device)
    k, v = (expand_heads(x, q.shape[1]) for x in (k, v))
    missing = None if how.causal or how.valid is None else ~how.valid
    heads = attend_listed(
        layout.split_blocks(q), k, v, None, lists, missing=missing, scale=how.scale, dropout=how.dropout
    )
    return layout.join_blocks(heads)


def _attend_streams(q: Tensor, k: Tensor, v: Tensor, dilation: int, how: How) -> Tensor:
    """The heads' outputs if each query sees all keys a multiple of `dilation` away: full attention in each stream.

    It needs no mask of its own, and the kernel leaves out the future.
    """
    batch, length = len(q), q.shape[2]
    dilation = min(dilation, length)
    steps = -(-length // dilation)
    rest = steps * dilation - length

    def streams(x: Tensor) -> Tensor:
        """(B, H, T, K) as (B * streams, H, T / streams, K)."""
        padded = F.pad(x, (0, 0, 0, rest)) if rest else x
        return padded.unflatten(2, (steps, dilation)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    real = how.valid
    if not how.causal and (rest or real is not None):
        real = q.new_ones(1, length, dtype=torch.bool) if real is None else real
        real = F.pad(real, (0, rest)).unflatten(1, (steps, dilation)).transpose(1, 2)
        real = real.expand(batch, -1, -1).flatten(0, 1)
    heads, _ = attend(*(streams(x) for x in (q, k, v)), **how._replace(valid=real)._asdict())
    heads = heads.unflatten(0, (batch, dilation)).permute(0, 2, 3, 1, 4)  # (B, H, T / streams, streams, V)
    return heads.flatten(2, 3)[:, :, :length]


def _with_rows(heads: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, how: How) -> Tensor:
    """The heads' outputs (B, H, T, V), including the queries that see all keys."""
    if rows := max((member.count for member in pattern.members if isinstance(member, Rows)), default=0):
        heads = torch.cat([_attend_rows(q[:, :, :rows], k, v, how), heads[:, :, rows:]], 2)
    for member in pattern.members:
        if isinstance(member, LastRows):
            assert not how.causal, "the last rows of a causal segment are unknown before its end"
            place = member.rows(q.shape[2])[:, None, None].expand(len(q), -1, -1, -1)  # (B, 1, 1, rows)
            of_member, column = _attend_rows(rows_at(q, place).squeeze(2), k, v, how), place.transpose(-1, -2)
            others = rows_at(heads, place).squeeze(2)
            of_member = of_member.where(column >= member.first.view(-1, 1, 1, 1), others)
            heads = heads.scatter(2, column.expand_as(of_member), of_member)
    return heads


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """The outputs of the queries q (B, H, rows, K), the first, over all keys; the fused kernel is slow for few."""
    if how.causal:  # no key behind the last row is seen by any of them
        k, v = (x[:, :, : q.shape[2]] for x in (k, v))
    i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    seen = torch.ones(len(i), len(j), dtype=torch.bool, device=q.device)
    segments = 1 if how.causal or how.valid is None else len(q)
    visible = visible_pairs(seen, how.causal, how.valid).expand(segments, 1, -1, -1)
    q, k, v, visible = (x[:, :, None, None] for x in (q, k, v, visible))  # one block
    tile = QueryBlocks(q, k, v, visible, i.view(1, 1, -1), j.view(1, 1, -1))
    return _attend_part(tile, how)[0][:, :, 0, 0]


def _attend_parts(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, how: How) -> Tensor:
    """The heads' outputs (B, H, T, V) over the members of the pattern, its rows excepted."""
    if k.shape[1] != v.shape[1]:
        k, v = (expand_heads(x, q.shape[1]) for x in (k, v))
    inputs = q, k, v
    parts = _parts(pattern, q.shape[2], how)
    fusable = how.positions is None and not how.dropout and can_fuse(q, v)
    if len(parts) == 1:
        [(layout, lay)] = parts
        if fusable and isinstance(layout, WindowLayout) and windows_are_faster(q, layout):
            return attend_windows(*inputs, layout, scale=how.scale, valid=how.valid)
        return layout.join_blocks([_attend(block, how) for block in lay(*inputs)])
    if fusable:
        return attend_parts(*inputs, [LaidPart(partial(_laid, *part)) for part in parts], scale=how.scale)
    attended = []
    for layout, lay in parts:
        heads, sums = zip(*[_attend_part(block, how) for block in lay(*inputs)], strict=True)
        attended.append((layout.join_blocks(list(heads)), layout.join_blocks(list(sums))))
    return join_parts(attended)[0]


def _parts(pattern: Pattern, length: int, how: How) -> list[Part]:
    """The layouts of the pattern's members, except its rows."""
    causal, valid, relative = how.causal, how.valid, how.positions is not None
    columns = Columns(max((member.count for member in pattern.members if isinstance(member, Columns)), default=0))
    parts: list[Part] = []
    earlier: Pattern = Union(())
    others = any(isinstance(member, Comb | Drawn) for member in pattern.members)
    for windows in _by_dilation(pattern) or ([] if others and not columns.count else [[]]):
        layout = WindowLayout(windows, length=length, causal=causal, columns=columns.count, elsewhere=bool(parts))
        parts.append((layout, partial(layout.lay_out, valid=valid, earlier=earlier, relative=relative)))
        earlier = Union((*earlier.members, *windows, columns))
    combs = tuple(member for member in pattern.members if isinstance(member, Comb))
    if combs:
        comb = CombLayout(Union(combs), length=length, causal=causal)
        parts.append((comb, partial(comb.lay_out, valid=valid, earlier=earlier)))
        earlier = Union((*earlier.members, *combs))
    for member in pattern.members:
        if isinstance(member, Drawn):
            drawn = DrawnLayout(member, length=length, causal=causal)
            parts.append((drawn, partial(drawn.lay_out, valid=valid, earlier=earlier)))
            earlier = earlier | member
    return parts


def _laid(
    layout: Layout, lay: Callable[[Tensor, Tensor, Tensor], list[QueryBlocks]], q: Tensor, k: Tensor, v: Tensor
) -> Laid:
    """A part in the axes of the fused kernel."""
    blocks = lay(q, k, v)
    folds = [Fold(block.q, block.k) for block in blocks]
    return Laid(
        [
            KernelRows(fold.queries(block.q), fold.keys(block.k), fold.keys(block.v), fold.mask(block.visible))
            for fold, block in zip(folds, blocks, strict=True)
        ],
        join_blocks=lambda rows: layout.join_blocks([fold.unfold(x) for fold, x in zip(folds, rows, strict=True)]),
        split_blocks=lambda x: [
            fold.queries(block) for fold, block in zip(folds, layout.split_blocks(x, blocks), strict=True)
        ],
    )


def _by_dilation(pattern: Pattern) -> list[list[Window]]:
    """The windows that share a layout; block windows come last, so that the parts before are alike for all blocks."""
    windows = sorted(
        (member for member in pattern.members if isinstance(member, Window)), key=lambda window: -window.dilation
    )
    return [list(group) for _, group in groupby(windows, key=lambda window: window.dilation)]


def _attend(blocks: QueryBlocks, how: How) -> Tensor:
    """The heads' outputs (B, H, streams, blocks, c, V) of a single part."""
    scale, positions, dropout = how.scale, how.positions, how.dropout
    if positions is not None and positions.on_values:
        return _attend_part(blocks, how)[0]
    fold, bias = Fold(blocks.q, blocks.k), _bias(blocks, how)
    simple = None if bias is not None else fold.simple_mask(blocks.visible)
    q, k, v = fold.queries(blocks.q), fold.keys(blocks.k), fold.keys(blocks.v)
    if simple is not None:
        return fold.unfold(fused_attention(q, k, v, scale=scale, dropout=dropout, is_causal=simple == "triangle"))
    some = blocks.visible.any(-1, keepdim=True)
    # some kernels give NaN for a row without any key: it sees all keys, and its output is cleared
    mask = blocks.visible | ~some
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf"))
    mask = fold.mask(mask)
    if bias is not None and positions is not None and positions.learned and q.device.type == "cpu":
        output = fold.unfold(attend_biased(q, k, v, mask, scale=scale, dropout=dropout))
    else:
        output = fold.unfold(fused_attention(q, k, v, mask=mask, scale=scale, dropout=dropout))
    return output if surely_all(some) else output * some


def _attend_part(blocks: QueryBlocks, how: How) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, H, streams, blocks, c, V) over only these keys, and their log-sum-exp (..., c, 1)."""
    positions, bias = how.positions, _bias(blocks, how)
    weights, log_sum = softmax_with_sum(blocks.q, blocks.k, how.scale, blocks.visible, bias)
    dropped = F.dropout(weights, how.dropout) if how.dropout else weights
    heads = weighted(dropped, blocks.v)
    extra = None if positions is None else positions.values(dropped, blocks.query_position, blocks.key_position)
    return heads if extra is None else heads + extra.type_as(heads), log_sum


def _bias(blocks: QueryBlocks, how: How) -> Tensor | None:
    """The bias (1 or B, H, streams, blocks, c, L), of length 1 along axes on which it is constant."""
    if how.positions is None:
        return None
    bias = how.positions.bias(blocks.q, blocks.query_position, blocks.key_position, how.scale)
    return bias if bias is None or bias.dim() == blocks.q.dim() else bias.unsqueeze(0)
