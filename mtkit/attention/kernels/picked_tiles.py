"""The layout of keys picked one by one: keys drawn for each block of queries, or the same keys for all queries.

Where whole blocks are picked, beside other whole blocks, the layout is a list of their numbers.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import spread
from mtkit.attention.kernels.pattern import Blocks, Columns, Pattern, Rows
from mtkit.attention.kernels.random_pattern import Drawn, LastRows
from mtkit.attention.kernels.tiles import Tiles
from mtkit.device import to_device


class DrawnLayout:
    """Each block of queries beside the keys drawn for it."""

    def __init__(self, pattern: Drawn, *, length: int, causal: bool) -> None:
        self.pattern, self.length, self.causal = pattern, length, causal
        self.blocks = -(-length // pattern.size)

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern) -> list[Tiles]:
        """All blocks of q (B, H, T, K), with k (B, G, S, K) and v (B, G, S, V), as one group.

        valid (B, S). What `earlier` sees is left out.
        """
        block, size = torch.arange(self.blocks, device=q.device), self.pattern.size
        i = block.unsqueeze(-1) * size + torch.arange(size, device=q.device)  # (blocks, c)
        j = self.pattern.beside(block)  # (B or 1, H, blocks, L)
        there = (j >= 0) & (j < k.shape[2])
        place = j.where(there, 0).expand(*q.shape[:2], -1, -1)
        if valid is not None:
            there = there & valid[:, None, None].expand(-1, *place.shape[1:3], -1).gather(-1, place)
        visible = there.unsqueeze(-2) & ~earlier.sees(i.unsqueeze(-1), j.unsqueeze(-2))
        if self.causal:
            visible = visible & (j.unsqueeze(-2) <= i.unsqueeze(-1))
        [rows] = self.laid(q)
        k, v = (self._gathered(spread(x, q.shape[1]), place) for x in (k, v))
        return [Tiles(rows, k, v, visible.unsqueeze(2), i.unsqueeze(0), j.unsqueeze(2))]

    def laid(self, x: Tensor, tiles: object = None) -> list[Tensor]:
        """The rows (B, H, 1, blocks, c, ...) of x (B, H, T, ...)."""
        rest = self.blocks * self.pattern.size - self.length
        return [(F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(2, (1, self.blocks, self.pattern.size))]

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """(B, H, T, V) from (B, H, 1, blocks, c, V)."""
        return outputs[0].flatten(2, 4)[:, :, : self.length]

    def _gathered(self, x: Tensor, place: Tensor) -> Tensor:
        """(B, H, 1, blocks, L, K)."""
        flat = place.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
        return x.gather(2, flat).unflatten(2, place.shape[2:]).unsqueeze(2)


class CombLayout:
    """All queries beside the same keys, those of one or more combs."""

    def __init__(self, combs: Pattern, *, length: int, causal: bool) -> None:
        self.combs, self.length, self.causal = combs, length, causal

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern) -> list[Tiles]:
        """One block of q (B, H, T, K), with k (B, G, T, K) and v (B, G, T, V); valid (B, T)."""
        [keys] = self.combs.keys(range(self.length), self.length)
        j = to_device(torch.tensor(list(keys) or [0]), q.device)  # the first is hidden where there are none
        i = torch.arange(self.length, device=q.device)
        visible = self.combs.sees(i.unsqueeze(-1), j) & ~earlier.sees(i.unsqueeze(-1), j)
        if self.causal:
            visible = visible & (j <= i.unsqueeze(-1))
        visible = visible.view(1, 1, 1, 1, *visible.shape)
        if valid is not None:
            visible = visible & valid[:, None, None, None, None, j]
        rows, k, v = (x[:, :, None, None] for x in (q, k.index_select(2, j), v.index_select(2, j)))
        return [Tiles(rows, k, v, visible, i.view(1, 1, -1), j.view(1, 1, -1))]

    def laid(self, x: Tensor, tiles: object = None) -> list[Tensor]:
        """The rows (B, H, 1, 1, T, ...) of x (B, H, T, ...)."""
        return [x[:, :, None, None]]

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """(B, H, T, V)."""
        return outputs[0][:, :, 0, 0]


def block_size(pattern: Pattern) -> int | None:
    """The size of the blocks if some are picked and all members (rows aside) see whole blocks of that size, else None.

    The first columns count as blocks where they fill them.
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


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept here serves training too
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
    """The blocks, out of `others` blocks of keys, beside the blocks `own` of queries, as `attend_picked` takes them.

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
