"""Softmax attention of query blocks over key blocks picked for each segment and head, in O(T) memory.

A pattern whose members all see blocks of one size, some of them picked (drawn or a segment's last ones), needs no
layout but a list of their numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.kernels.pattern import Blocks, Columns, Pattern, Rows
from mtkit.attention.kernels.random_pattern import Drawn, LastRows
from mtkit.attention.kernels.tiled_softmax import (
    FAR,
    LOG2,
    RowIndex,
    Slices,
    Tile,
    TileProvider,
    attend_blocks,
    scores_at_once,
)
from mtkit.device import to_device
from mtkit.recording import kept


def block_size(pattern: Pattern) -> int | None:
    """The size of the blocks if some are picked and all members (rows aside) see whole blocks of that size, else None.

    The first columns count as blocks if they fill them.
    """
    sizes = {member.size for member in pattern.members if isinstance(member, Drawn)}
    if len(sizes) != 1:
        return None
    [size] = sizes
    return size if all(_in_blocks(member, size) for member in pattern.members) else None


def _in_blocks(member: Pattern, size: int) -> bool:
    if isinstance(member, Blocks | Drawn):
        return member.size == size
    return isinstance(member, Rows | LastRows) or (isinstance(member, Columns) and member.count % size == 0)


@kept(64)
def keys_of_block(pattern: Pattern, size: int, block: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The keys that causal queries of a block see, for steps; None if these are all up to the query's own.

    A pattern with a `block_size`, its rows excepted. Positions (L,), or (h, L) where heads differ, up to the end of the
    block, and whether there is a key. Kept, because all steps within the block ask for them.
    """
    picks = picks_of(pattern, size, torch.tensor([block]), block + 1, causal=True)[0, :, 0]
    picks = picks[:, (picks >= 0).any(0)]  # without slots that are empty for all heads
    there = picks >= 0
    if picks.shape[1] > block and there.all():
        return None
    position = picks.unsqueeze(-1) * size + torch.arange(size)
    keys = position.flatten(1), there.unsqueeze(-1).expand_as(position).flatten(1)
    position, there = (to_device(x.squeeze(0) if len(picks) == 1 else x, device) for x in keys)
    return position, there


def picks_of(pattern: Pattern, size: int, own: Tensor, others: int, causal: bool) -> Tensor:
    """The blocks, out of `others` blocks of keys, for the blocks `own` of queries, as `attend_picked` takes them.

    A pattern with a `block_size`, its rows excepted.
    """
    blocks, device = len(own), own.device
    parts = [own.new_empty(1, 1, blocks, 0)]
    for member in pattern.members:
        if isinstance(member, Drawn):
            parts.append(member.picks(own))
        elif isinstance(member, Blocks):
            near = torch.arange(-min(member.back, others), min(member.ahead, others) + 1, device=device)
            parts.append((own.unsqueeze(-1) + near).expand(1, 1, -1, -1))
        elif isinstance(member, Columns):
            first = torch.arange(min(member.count // size, others), device=device)
            parts.append(first.expand(1, 1, blocks, -1))
    shape = torch.broadcast_shapes(*(part.shape[:3] for part in parts))
    picks = torch.cat([part.expand(*shape, -1) for part in parts], dim=-1)
    last = own.unsqueeze(-1).clamp(max=others - 1) if causal else others - 1
    picks = picks.where((picks >= 0) & (picks <= last), -1).sort(dim=-1).values
    again = picks[..., 1:] == picks[..., :-1]
    return torch.cat([picks[..., :1], picks[..., 1:].masked_fill(again, -1)], dim=-1).sort(dim=-1).values


def attend_picked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    picks: Tensor,
    size: int,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The heads' outputs (B, H, T, V) over blocks of keys picked for each block of queries, zero without a key.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V); G and G' divide H; valid (B, S). picks (B or 1, H or 1,
    blocks, slots) are numbers of blocks of `size` keys, each once, in ascending order after the empty slots, which are
    -1; if causal, none is larger than the number of the queries' block.
    """
    batch, heads, length = q.shape[:3]
    if k.shape[1] != v.shape[1]:
        k, v = (expand_heads(x, heads) for x in (k, v))
    blocks, others = -(-length // size), -(-k.shape[2] // size)
    valid = torch.ones(1, k.shape[2], dtype=torch.bool, device=q.device) if valid is None else valid
    hidden = F.pad((~valid).type_as(upcast(q)) * FAR, (0, others * size - k.shape[2]), value=FAR)
    segment, head = torch.arange(batch, device=q.device).unsqueeze(-1), torch.arange(heads, device=q.device)
    first_key = (segment * k.shape[1] + head // (heads // k.shape[1])) * others
    first_hidden = (segment.clamp(max=len(hidden) - 1) * others).expand(-1, heads)
    provider = _PickedBlocks(
        scale,
        picks.expand(batch, heads, -1, -1).flatten(0, 2),
        first_key.repeat_interleave(blocks),
        first_hidden.repeat_interleave(blocks),
        F.pad(hidden.view(-1, size), (0, 0, 0, 1), value=FAR),
        torch.arange(blocks, device=q.device).repeat(batch * heads) if causal and size > 1 else None,
    )
    q, k, v = (F.pad(x, (0, 0, 0, count * size - x.shape[2])) for x, count in ((q, blocks), (k, others), (v, others)))
    q, k, v = (x.reshape(-1, size, x.shape[-1]) for x in (q, k, v))
    output, _ = attend_blocks(provider, q, k, v, dropout=dropout)
    return output.type_as(v).view(batch, heads, blocks * size, -1)[:, :, :length]


class BlockIndex(RowIndex):
    """Blocks of rows (b, slots)."""

    def of(self, x: Tensor) -> Tensor:
        """The blocks (b, slots * size, K) of x (n, size, K)."""
        return super().of(x).flatten(1, 2)

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add blocks (b, slots * size, K) to total (n, size, K)."""
        total.flatten(1).index_add_(0, self.index.flatten(), rows.reshape(self.index.numel(), -1).type_as(total))


class _PickedBlocks(TileProvider):
    """Blocks of all segments and heads, on one axis of length n: queries (n, c, K), keys (n', c, K)."""

    def __init__(
        self, scale: float, picks: Tensor, first_key: Tensor, first_hidden: Tensor, hidden: Tensor, own: Tensor | None
    ) -> None:
        """Store the picks and masks of each query block.

        picks (n, slots); first_key (n,): the first block of the same segment and head among all blocks of keys, and
        first_hidden (n,) among hidden (blocks + 1, c), which is added to scores: the last row is an empty slot's. If
        causal, own (n,): the number of the key block at the queries' positions.
        """
        super().__init__(scale)
        self.picks, self.first_key, self.first_hidden = picks, first_key, first_hidden
        self.hidden, self.own = hidden, own

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: None) -> Iterator[Tile]:
        (count, size), slots = q.shape[:2], self.picks.shape[1]
        values = size * slots * max(size, k.shape[-1] // 2)  # scores of a block, or half of its keys if these are more
        most = max(scores_at_once(q.device) // values, 1)
        later = torch.full((size, size), FAR, dtype=self.hidden.dtype, device=q.device).triu(1)
        for first in range(0, count, most):
            place = Slices((slice(first, min(first + most, count)),))
            picks, first_key, first_hidden = (place.of(x) for x in (self.picks, self.first_key, self.first_hidden))
            keys = BlockIndex(first_key.unsqueeze(-1) + picks.clamp(min=0))
            hidden = torch.where(picks < 0, len(self.hidden) - 1, first_hidden.unsqueeze(-1) + picks)
            rows, near_k, near_v = place.of(q) * (self.scale / LOG2), keys.of(k), keys.of(v)
            scores = upcast(rows @ near_k.mT)
            scores += RowIndex(hidden).of(self.hidden).flatten(1).unsqueeze(1)
            if self.own is not None:
                scores[..., -size:].add_(later * (picks[:, -1] == place.of(self.own)).view(-1, 1, 1))
            yield Tile(place, keys, keys, rows, near_k, near_v, scores)
