"""A pattern in two dimensions: positions folded row by row into a grid, in which blocks of queries see what is near.

For `attend_listed`, a grid is lists of keys next to rectangles of queries. A rectangle is one block of the grid, or
several neighbours if blocks are small, or a part of one if they are large.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.listed import Lists
from mtkit.attention.kernels.pattern import Pattern
from mtkit.recording import kept


@dataclass(frozen=True)
class Grid(Pattern):
    """The keys in the query's own block of a grid and in a margin around the block.

    width: positions per row of the grid. block: rows and columns of a block. margin: rows seen above and below the
    block, and columns seen at its left and right.
    """

    width: int
    block: tuple[int, int]
    margin: tuple[int, int]

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether row and column of j are near enough to the block of i."""
        places = zip(self._place(i), self._place(j), self.block, self.margin, strict=True)
        rows, columns = (
            (first - margin <= there) & (there < first + size + margin)
            for first, there, size, margin in (
                (own.div(size, rounding_mode="floor") * size, there, size, margin)
                for own, there, size, margin in places
            )
        )
        return rows & columns

    def covers(self, length: int, causal: bool) -> bool:
        """Whether the last block reaches the first row and column, and the first block the last ones."""
        sides = (-(-length // self.width), min(length, self.width))
        return all(
            margin >= (side - 1) // size * size and size + margin >= side
            for side, size, margin in zip(sides, self.block, self.margin, strict=True)
        )

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """Row by row, the columns that any of the queries' blocks sees there."""
        (rows, columns), (above, beside) = self.block, self.margin
        seen: dict[int, set[int]] = {}
        for row, column in {(i // self.width // rows, i % self.width // columns) for i in queries}:
            first, last = max(row * rows - above, 0), min((row + 1) * rows + above, -(-length // self.width))
            across = range(max(column * columns - beside, 0), min((column + 1) * columns + beside, self.width, length))
            for seen_row in range(first, last):
                seen.setdefault(seen_row, set()).update(across)
        return [[at for row in sorted(seen) for x in sorted(seen[row]) if (at := row * self.width + x) < length]]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The rows of the query's block and those above it."""
        return 0, (self.block[0] + self.margin[0]) * self.width

    def _place(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column."""
        return x.div(self.width, rounding_mode="floor"), x % self.width


FEWEST, MOST = 32, 128
"""Queries of a rectangle, if blocks allow it: few make slow products, and more would make larger scores at once."""


class GridLayout:
    """The queries of a sequence, rectangle by rectangle.

    shape: rows and columns of a rectangle; across: rectangles side by side; down: rectangles below each other.
    """

    def __init__(self, grid: Grid, length: int) -> None:
        rows, columns = grid.block
        self.grid, self.length = grid, length
        self.width = min(grid.width, length)  # columns that hold anything
        self.lines = -(-length // self.width)  # rows of the grid
        rows, columns = min(rows, self.lines), min(columns, self.width)
        neighbours = min(max(FEWEST // (rows * columns), 1), -(-self.width // columns))
        high = max(
            height for height in range(1, rows + 1) if rows % height == 0 and (height == 1 or height * columns <= MOST)
        )
        self.shape = high, columns * neighbours
        self.down, self.across = -(-self.lines // high), -(-self.width // self.shape[1])

    def split_blocks(self, x: Tensor) -> Tensor:
        """(B, H, T, K) as (B, H, rectangles * their queries, K), zeros beyond the grid."""
        (high, wide), width = self.shape, self.width
        x = F.pad(x, (0, 0, 0, self.down * high * width - self.length)).unflatten(2, (-1, width))
        x = F.pad(x, (0, 0, 0, self.across * wide - width))
        return x.unflatten(3, (self.across, wide)).unflatten(2, (self.down, high)).transpose(3, 4).flatten(2, 5)

    def join_blocks(self, x: Tensor) -> Tensor:
        """The way back, to (B, H, T, V)."""
        x = x.unflatten(2, (self.down, self.across, *self.shape)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return x[:, :, :, : self.width].flatten(2, 3)[:, :, : self.length]

    def lists(self, causal: bool, device: torch.device) -> Lists:
        """The keys next to each rectangle; label 0 if a query sees one, else 1."""
        (high, wide), rows, (above, beside) = self.shape, self.grid.block[0], self.grid.margin
        top, left = torch.arange(self.down, device=device) * high, torch.arange(self.across, device=device) * wide
        i = _positions(_span(top, high), _span(left, wide), self.width)
        most = rows + 2 * above if not causal else rows + above
        lines = _near(top - top % rows - above, most, self.lines)
        j = _positions(lines, _near(left - beside, wide + 2 * beside, self.width), self.width)
        seen = self.grid.sees(i.unsqueeze(2), j.unsqueeze(1)) & (j < self.length).unsqueeze(1)
        if causal:
            seen &= j.unsqueeze(1) <= i.unsqueeze(2)
        return Lists(j.clamp(max=self.length - 1), (~seen).to(torch.uint8))


@kept(4)  # takes one byte per listed pair
def grid_lists(grid: Grid, length: int, causal: bool, device: torch.device) -> tuple[GridLayout, Lists]:
    """The layout and the lists of `length` queries, a function of only the arguments, so that all layers share one."""
    layout = GridLayout(grid, length)
    return layout, layout.lists(causal, device)


def _span(first: Tensor, count: int) -> Tensor:
    """(n, count): as many numbers from each first one on."""
    return first.unsqueeze(1) + torch.arange(count, device=first.device)


def _near(first: Tensor, count: int, there: int) -> Tensor:
    """Return `count` numbers from each first one on, shifted into the range from 0 to `there`; all of these at most."""
    return _span(first.clamp(0, max(there - count, 0)), min(count, there))


def _positions(rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """The positions (down * across, rows * columns) of rows (down, rows) and columns (across, columns) of a grid."""
    places = rows[:, None, :, None] * width + columns[None, :, None, :]
    return places.flatten(2).flatten(0, 1)
