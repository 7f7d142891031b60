"""A pattern in two dimensions: positions folded row by row into a grid, in which blocks of queries see what is near."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from mtkit.attention.engines.blocks.pattern import Pattern


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
            for each in range(first, last):
                seen.setdefault(each, set()).update(across)
        return [[at for row in sorted(seen) for x in sorted(seen[row]) if (at := row * self.width + x) < length]]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The rows of the query's block and those above it."""
        return 0, (self.block[0] + self.margin[0]) * self.width

    def _place(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column."""
        return x.div(self.width, rounding_mode="floor"), x % self.width
