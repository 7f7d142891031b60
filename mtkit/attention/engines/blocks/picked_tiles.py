"""The layout of keys picked one by one: keys drawn for each block of queries, or the same keys for all queries."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.blocks.pattern import Pattern
from mtkit.attention.engines.blocks.random_pattern import Drawn
from mtkit.attention.engines.blocks.tiles import Tiles
from mtkit.attention.engines.softmax.dot_product import spread
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
        place = j.where(there, 0).expand(len(q), -1, -1, -1)
        if valid is not None:
            there = there & valid[:, None, None].expand(-1, *place.shape[1:3], -1).gather(-1, place)
        visible = there.unsqueeze(-2) & ~earlier.sees(i.unsqueeze(-1), j.unsqueeze(-2))
        if self.causal:
            visible = visible & (j.unsqueeze(-2) <= i.unsqueeze(-1))
        rest = self.blocks * size - self.length
        rows = (F.pad(q, (0, 0, 0, rest)) if rest else q).unflatten(2, (1, self.blocks, size))
        k, v = (self._gathered(spread(x, q.shape[1]), place) for x in (k, v))
        return [Tiles(rows, k, v, visible.unsqueeze(2), i.unsqueeze(0), j.unsqueeze(2))]

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

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """(B, H, T, V)."""
        return outputs[0][:, :, 0, 0]
