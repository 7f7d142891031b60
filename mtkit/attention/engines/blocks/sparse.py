"""The engine that runs any sparse position pattern in blocks, counting each key once, without a T x T tensor.

Each block of queries is laid out beside the keys it may see (`tiles`), and one fused softmax runs over all blocks of a
group. Members of a pattern that need another layout (another dilation, a comb, random keys) are a part of their own,
which omits keys that earlier parts have seen. The softmaxes of the parts are joined by their log-sum-exp.
"""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.blocks.pattern import Columns, Comb, Pattern, Rows, Union, Window
from mtkit.attention.engines.blocks.picked_tiles import CombLayout, DrawnLayout
from mtkit.attention.engines.blocks.random_pattern import Drawn
from mtkit.attention.engines.blocks.tiles import Tiles, WindowLayout
from mtkit.attention.engines.softmax.dot_product import attend, scores_of, spread, weigh, weighted
from mtkit.attention.engines.softmax.fused import fused_attention
from mtkit.attention.engines.softmax.joining import join_parts, softmax_with_sum
from mtkit.attention.slots import Positions

Part = tuple[WindowLayout | CombLayout | DrawnLayout, list[Tiles]]
"""What shares a layout, laid out."""


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
    """The result of `attend` where each query sees only the keys of the pattern.

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V) where G and G' divide H; valid (B, T), padding on the right. Weights
    (B, H, T, T) are formed only on request. Relative positions do not combine with random keys. A pattern of random
    members alone may draw the keys of another sequence, (B, G, S, K) with valid (B, S).
    """
    if pattern.covers(k.shape[2], causal):
        return attend(
            q,
            k,
            v,
            scale=scale,
            causal=causal,
            valid=valid,
            positions=positions,
            dropout=dropout,
            need_weights=need_weights,
        )
    if need_weights:
        i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        return dense_attend(
            q, k, v, visible_pairs(pattern.sees(i.unsqueeze(-1), j), causal, valid), scale, positions, dropout
        )
    parts = _parts(q, k, v, pattern, causal, None if causal else valid, positions is not None)
    if len(parts) == 1:
        only, tiles = parts[0]
        heads = only.joined([_attend(each, scale, positions, dropout) for each in tiles])
    else:
        heads, _ = join_parts(_attended_parts(parts, scale, positions, dropout))
    if rows := _rows(pattern):
        first, _ = _attend_rows(q[:, :, :rows], k, v, scale, causal, valid, positions, dropout)
        heads = torch.cat([first, heads[:, :, rows:]], dim=2)
    return heads, None


def sparse_attend_part(
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
) -> tuple[Tensor, Tensor]:
    """The result of `attend_part` where each query sees only the keys of the pattern, to be joined with other keys.

    Arguments are those of `sparse_attend`; gives outputs (B, H, T, V) and the log-sum-exp (B, H, T, 1) for
    `join_parts`.
    """
    parts = _parts(q, k, v, pattern, causal, None if causal else valid, positions is not None)
    attended = join_parts(_attended_parts(parts, scale, positions, dropout))
    if rows := _rows(pattern):
        first = _attend_rows(q[:, :, :rows], k, v, scale, causal, valid, positions, dropout)
        heads, log_sum = (torch.cat([one, every[:, :, rows:]], 2) for one, every in zip(first, attended, strict=True))
        return heads, log_sum
    return attended


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
    query_position, key_position = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return weigh(
        scores_of(q, k, scale),
        q,
        v,
        scale=scale,
        visible=visible,
        positions=positions,
        query_position=query_position,
        key_position=key_position,
        dropout=dropout,
    )


def _rows(pattern: Pattern) -> int:
    """The number of first queries that see all keys."""
    return max((member.count for member in pattern.members if isinstance(member, Rows)), default=0)


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    valid: Tensor | None,
    positions: Positions | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The first queries q (B, H, rows, K) over all keys: outputs and log-sum-exp; the fused kernel is slow for few."""
    if causal:  # no key behind the last row is seen by any of them
        k, v = (x[:, :, : q.shape[2]] for x in (k, v))
    i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    seen = torch.ones(len(i), len(j), dtype=torch.bool, device=q.device)
    visible = visible_pairs(seen, causal, valid).expand(1 if causal or valid is None else len(q), 1, -1, -1)
    q, k, v, visible = (x[:, :, None, None] for x in (q, k, v, visible))  # one block
    tile = Tiles(q, k, v, visible, i.view(1, 1, -1), j.view(1, 1, -1))
    heads, log_sum = _attend_part(tile, scale, positions, dropout)
    return heads[:, :, 0, 0], log_sum[:, :, 0, 0]


def _parts(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, valid: Tensor | None, relative: bool
) -> list[Part]:
    """The layouts of the members of the pattern, its rows excepted."""
    if k.shape[1] != v.shape[1]:
        k, v = (spread(x, q.shape[1]) for x in (k, v))
    length = q.shape[2]
    columns = Columns(max((member.count for member in pattern.members if isinstance(member, Columns)), default=0))
    parts: list[Part] = []
    earlier: Pattern = Union(())
    others = any(isinstance(member, Comb | Drawn) for member in pattern.members)
    for windows in _by_dilation(pattern) or ([] if others and not columns.count else [[]]):
        layout = WindowLayout(windows, length=length, causal=causal, columns=columns.count, elsewhere=bool(parts))
        tiles = layout.tiles(q, k, v, valid=valid, earlier=earlier, relative=relative)
        parts.append((layout, tiles))
        earlier = Union((*earlier.members, *windows, columns))
    combs = tuple(member for member in pattern.members if isinstance(member, Comb))
    if combs:
        comb = CombLayout(Union(combs), length=length, causal=causal)
        parts.append((comb, comb.tiles(q, k, v, valid=valid, earlier=earlier)))
        earlier = Union((*earlier.members, *combs))
    for member in pattern.members:
        if isinstance(member, Drawn):
            drawn = DrawnLayout(member, length=length, causal=causal)
            parts.append((drawn, drawn.tiles(q, k, v, valid=valid, earlier=earlier)))
            earlier = earlier | member
    return parts


def _attended_parts(
    parts: list[Part], scale: float, positions: Positions | None, dropout: float
) -> list[tuple[Tensor, Tensor]]:
    """The heads' outputs (B, H, T, V) and the log-sum-exp (B, H, T, 1) of each part by itself."""
    attended = []
    for part, tiles in parts:
        outputs = [_attend_part(each, scale, positions, dropout) for each in tiles]
        heads, sums = zip(*outputs, strict=True)
        attended.append((part.joined(list(heads)), part.joined(list(sums))))
    return attended


def _by_dilation(pattern: Pattern) -> list[list[Window]]:
    """The windows that share a layout; block windows come last, so that the parts before are alike for all blocks."""
    windows = sorted((each for each in pattern.members if isinstance(each, Window)), key=lambda each: -each.dilation)
    return [list(group) for _, group in groupby(windows, key=lambda each: each.dilation)]


def _attend(tiles: Tiles, scale: float, positions: Positions | None, dropout: float) -> Tensor:
    """The heads' outputs (B, H, streams, blocks, c, V) of a part that stands alone."""
    if positions is not None and positions.on_values:
        return _attend_part(tiles, scale, positions, dropout)[0]
    some = tiles.visible.any(-1, keepdim=True)
    # some kernels give NaN for a row without any key: it sees all keys, and its output is cleared
    mask = tiles.visible | ~some
    bias = _bias(tiles, positions, scale)
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf")).type_as(tiles.q)
    return _fused(tiles.q, tiles.k, tiles.v, mask, scale, dropout) * some


def _attend_part(tiles: Tiles, scale: float, positions: Positions | None, dropout: float) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, H, streams, blocks, c, V) over these keys alone, and their log-sum-exp (..., c, 1)."""
    weights, log_sum = softmax_with_sum(tiles.q, tiles.k, scale, tiles.visible, _bias(tiles, positions, scale))
    dropped = F.dropout(weights, dropout) if dropout else weights
    heads = weighted(dropped, tiles.v)
    extra = None if positions is None else positions.values(dropped, tiles.query_position, tiles.key_position)
    return heads if extra is None else heads + extra.type_as(heads), log_sum


def _bias(tiles: Tiles, positions: Positions | None, scale: float) -> Tensor | None:
    """The bias (1 or B, H, streams, blocks, c, L), of length 1 along axes on which it is constant."""
    if positions is None:
        return None
    bias = positions.bias(tiles.q, tiles.query_position, tiles.key_position, scale)
    return bias if bias is None or bias.dim() == tiles.q.dim() else bias.unsqueeze(0)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, dropout: float) -> Tensor:
    """Scaled dot-product attention of tiles by the fused kernel, which knows four axes.

    The streams of all heads become its batch axis and the blocks its head axis. Queries that share a key head become
    rows of one block, so that keys are never copied.
    """
    batch, heads, streams, blocks, block = q.shape[:5]
    group = heads // k.shape[1]
    if group > 1:
        q = q.unflatten(1, (-1, group)).movedim(2, 4).flatten(4, 5)  # (B, G, streams, blocks, group * c, K)
        mask = mask if mask.shape[1] > 1 else mask.expand(-1, group, -1, -1, -1, -1)
        mask = mask.unflatten(1, (-1, group)).movedim(2, 4).flatten(4, 5)
    if streams * blocks == 1:
        q, k, v, mask = (x.flatten(2, 4) for x in (q, k, v, mask))
        output = fused_attention(q, k, v, mask=mask, dropout=dropout, scale=scale)
    else:
        if max(mask.shape[:3]) > 1:
            mask = mask.expand(*q.shape[:3], -1, -1, -1)
        q, k, v, mask = (x.flatten(0, 2) for x in (q, k, v, mask))
        output = fused_attention(q, k, v, mask=mask, dropout=dropout, scale=scale)
        output = output.unflatten(0, (batch, -1, streams))
    output = output.reshape(batch, -1, streams, blocks, group, block, v.shape[-1])
    return output.movedim(4, 2).flatten(1, 2)
