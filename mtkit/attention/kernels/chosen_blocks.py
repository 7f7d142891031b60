"""Softmax attention over blocks of keys that each query chooses for itself, in O(T) memory.

The queries that choose a block, at one rank of their choices, are laid out side by side and read it together. The
softmax of a query over its blocks is joined by log-sum-exp (Lu et al., "MoBA", 2025, arXiv 2502.13189, algorithm 1).
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.chunks import in_blocks
from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.kernels.flash.chosen import ChosenPart
from mtkit.attention.kernels.flash.looped import LoopedPart, loops_read
from mtkit.attention.kernels.flash.parts import Part, attend_parts, can_fuse
from mtkit.attention.kernels.flash.windows import WindowPart
from mtkit.attention.kernels.pattern import Blocks
from mtkit.attention.kernels.pattern_blocks import WindowLayout
from mtkit.attention.kernels.picked_blocks import BlockIndex
from mtkit.attention.kernels.tiled_softmax import FAR, LOG2, RowIndex, Tile, TileProvider, attend_blocks, scores_at_once

TOGETHER = 32
"""Queries that read a block of keys together."""
ROWS_AT_ONCE = {"cpu": 1 << 14}
"""Queries of whole streams that are worked on at a time, by kind of device; 2^22 on others."""
ROWS_OF_CHOICES = 1024
"""Fewest rows of scores whose largest a thread finds."""
FORCED = torch.finfo(torch.float32).max
"""Score of a block that is chosen whatever its content; infinity precedes it."""


def best_blocks(scores: Tensor, count: int) -> Tensor:
    """Return the numbers (..., count) of the blocks with the largest scores (..., M), the best first.

    A block with the score -inf is not chosen: M means none. Scores are compared in float32; of equal ones, the
    lower number comes first: `topk` of scores would order them by a rule that depends on M.
    """
    scores, blocks = scores.detach().float(), scores.shape[-1]
    best = torch.full((*scores.shape[:-1], count), blocks, device=scores.device)
    if has_loops(scores.device) and best.numel():
        from mtkit.attention.kernels.cpu.choice_loops import write_largest
        from mtkit.attention.kernels.cpu.threads import in_ranges

        rows = scores.reshape(-1, blocks)
        in_ranges(partial(write_largest, rows.numpy(), best.view(-1, count).numpy()), len(rows), ROWS_OF_CHOICES)
        return best
    scores = scores.clone()
    for rank in range(min(count, blocks)):
        largest, number = scores.max(-1, keepdim=True)  # the first one of equals
        best[..., rank : rank + 1] = number.masked_fill(largest == float("-inf"), blocks)
        scores.scatter_(-1, number, float("-inf"))
    return best


def has_loops(device: torch.device) -> bool:
    """Return whether compiled loops run on this device."""
    return device.type == "cpu"


class Near(NamedTuple):
    """Blocks that each query sees by its position: so many before and after its own, and so many from the first on."""

    back: int = 0
    ahead: int = 0
    first: int = 0

    def sees(self, own: Tensor, block: Tensor) -> Tensor:
        """Return whether queries of blocks `own` see the blocks."""
        return (block < self.first) | ((block >= own - self.back) & (block <= own + self.ahead))


def attend_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    size: int,
    *,
    scale: float,
    near: Near | None = None,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the heads' outputs (B, H, T, V) over the blocks that each query chooses, zero without a key.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V); valid (B, S). chosen (B, C, T, n) are numbers of blocks of `size`
    keys, each at most once; the number of all blocks means none. G, G' and C divide H. `near` blocks are among the
    choices of each query, as far as they exist and have keys; they need not be gathered. If causal, `near` is not None,
    the first choice of each query is its own block, other choices are earlier blocks, and later keys are hidden.
    """
    if k.shape[1] != v.shape[1]:
        k, v = (expand_heads(x, q.shape[1]) for x in (k, v))
    valid = None if causal else valid  # padding is on the right
    if not dropout and can_fuse(q, v):
        if loops_read(q, k, v, size):
            parts: list[Part] = [LoopedPart(chosen, size, k.shape[2], valid, causal)]
        else:
            parts = _parts(q, k, chosen, size, near, causal, valid)
        return attend_parts(q, k, v, parts, scale=scale)
    return _attend_tiled(q, k, v, chosen, size, scale, causal, valid, dropout)


def _parts(
    q: Tensor, k: Tensor, chosen: Tensor, size: int, near: Near | None, causal: bool, valid: Tensor | None
) -> list[Part]:
    """Return the blocks near each query as windows, and the others."""
    if near is None:
        return [ChosenPart(chosen, size, k.shape[2], valid)]
    window = Blocks(size, near.back, 0 if causal else near.ahead)
    layout = WindowLayout([window], length=k.shape[2], causal=causal, columns=near.first * size)
    query_block = torch.arange(q.shape[2]).unsqueeze(-1) // size
    chosen = chosen.masked_fill(near.sees(query_block, chosen), -(-k.shape[2] // size))
    return [WindowPart(layout, valid), ChosenPart(chosen, size, k.shape[2], valid)]


def _attend_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    size: int,
    scale: float,
    causal: bool,
    valid: Tensor | None,
    dropout: float,
) -> Tensor:
    batch, heads, length = q.shape[:3]
    groups, blocks = k.shape[1], -(-k.shape[2] // size)
    rest = blocks * size - k.shape[2]
    hidden = None
    if rest or valid is not None:
        seen = torch.ones(batch, k.shape[2], dtype=torch.bool, device=q.device) if valid is None else valid
        hidden = F.pad((~seen).type_as(upcast(q)) * FAR, (0, rest), value=FAR).view(-1, size)
    k, v = (F.pad(x, (0, 0, 0, rest)).reshape(-1, size, x.shape[-1]) for x in (k, v))
    segment, head = torch.arange(batch, device=q.device).unsqueeze(-1), torch.arange(heads, device=q.device)
    first = torch.stack(torch.broadcast_tensors(segment * groups + head // (heads // groups), segment), -1) * blocks
    choices = expand_heads(chosen, heads).flatten(0, 1)
    provider = _ChosenBlocks(scale, choices, first.flatten(0, 1), blocks, size, causal, hidden)
    output, _ = attend_blocks(provider, q.flatten(0, 2), k, v, dropout=dropout)
    return output.type_as(v).view(batch, heads, length, -1)


class _Laid(NamedTuple):
    """Queries that read a block of keys together, (n, c); the number of all queries means none."""

    queries: Tensor
    block: Tensor
    """(n, 1): the number of the block in its segment."""
    first: Tensor
    """(n, 2): the first block of the same segment and group of heads, and of the same segment, among all."""


class _ChosenBlocks(TileProvider):
    """Queries (N * T, K) of N streams, and blocks of keys (n, size, K)."""

    joined = True

    def __init__(
        self, scale: float, choices: Tensor, first: Tensor, blocks: int, size: int, causal: bool, hidden: Tensor | None
    ) -> None:
        """Store choices (N, T, n), the first blocks (N, 2) as in `_Laid`, and what is added to scores (B * M, size)."""
        super().__init__(scale)
        self.choices, self.first, self.blocks, self.size = choices, first, blocks, size
        self.causal, self.hidden = causal, hidden
        self._layouts: dict[tuple[int, int], _Laid] = {}

    def _laid(self, stream: int, several: int, rank: int) -> _Laid:
        """Return the queries of some streams by their choice at one rank; kept for the backward pass."""
        if (stream, rank) not in self._layouts:
            group = self.choices[stream : stream + several, :, rank]
            length, count = group.shape[1], len(self.choices) * group.shape[1]
            laid = in_blocks(group, self.blocks, min(TOGETHER, self.size, length))
            block = group.gather(1, laid.members[..., 0]).unsqueeze(-1)  # (s, rows, 1)
            start = torch.arange(stream, stream + len(group), device=group.device).view(-1, 1, 1) * length
            queries = (laid.members + start).masked_fill(~laid.filled, count)
            first = self.first[stream : stream + several].unsqueeze(1).expand(-1, queries.shape[1], -1)
            rows = _Laid(*(x.flatten(0, 1) for x in (queries, block.clamp(max=self.blocks - 1), first)))
            if group.device.type == "cpu":  # an accelerator would be waited for
                some = laid.filled[..., 0].flatten()
                rows = _Laid(*(x[some] for x in rows))
            self._layouts[stream, rank] = rows
        return self._layouts[stream, rank]

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: None) -> Iterator[Tile]:
        streams, length, ranks = self.choices.shape
        several = max(ROWS_AT_ONCE.get(q.device.type, 1 << 22) // length, 1)
        # the scores of a block, or half of the numbers in its keys if they are more
        scores = min(TOGETHER, self.size, length) * max(self.size, k.shape[-1] // 2)
        most = max(scores_at_once(q.device) // scores, 1)
        place = torch.arange(self.size, device=q.device)
        for stream in range(0, streams, several):
            for rank in range(ranks):
                laid = self._laid(stream, several, rank)
                for some in range(0, len(laid.queries), most):
                    queries, block, first = (x[some : some + most] for x in laid)
                    keys = BlockIndex(block + first[:, :1])
                    rows = RowIndex(queries.clamp(max=len(q) - 1)).of(q) * (self.scale / LOG2)
                    near_k, near_v = keys.of(k), keys.of(v)
                    scores_here = upcast(rows @ near_k.mT)
                    if self.hidden is not None:
                        scores_here += RowIndex(block + first[:, 1:]).of(self.hidden)
                    if self.causal and rank == 0:
                        position = (queries % length).unsqueeze(-1)
                        scores_here.masked_fill_(block.unsqueeze(-1) * self.size + place > position, FAR)
                    yield Tile(
                        RowIndex(queries),
                        keys,
                        keys,
                        rows,
                        near_k,
                        near_v,
                        scores_here,
                        (queries < len(q)).unsqueeze(-1),
                    )
