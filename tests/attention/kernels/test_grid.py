"""A grid as lists: the engine gives what a dense mask gives, and lists hold little that no query sees."""

import random

import pytest
import torch

from mtkit.attention.kernels.grid import FEWEST, MOST, Grid, GridLayout, grid_lists
from mtkit.attention.kernels.sparse import dense_attend, sparse_attend, visible_pairs

CPU = torch.device("cpu")
GRIDS = {
    "ragged": Grid(12, (3, 5), (2, 1)),
    "without rows around": Grid(7, (2, 2), (0, 3)),
    "single queries": Grid(9, (1, 1), (1, 1)),
    "wider than the grid": Grid(6, (2, 40), (1, 50)),
    "large": Grid(20, (16, 20), (1, 2)),
    "one column": Grid(1, (4, 1), (3, 0)),
    "one row": Grid(1 << 30, (1, 6), (1 << 30, 4)),
}


def drawn(seed: int) -> Grid:
    draw = random.Random(seed)
    sizes = draw.choices(range(1, 12), k=3)
    return Grid(sizes[0], (sizes[1], sizes[2]), (draw.randint(0, 6), draw.randint(0, 6)))


@pytest.mark.parametrize("grid", [*GRIDS.values(), *map(drawn, range(12))], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lists_give_what_a_dense_mask_gives(grid: Grid, causal: bool) -> None:
    for length in (1, 4, 33, 97, 240):
        at, lengths = torch.arange(length), torch.tensor([length, max(length - 9, 0)])
        valid = at < lengths.unsqueeze(1)
        shapes = (2, 4, length, 5), (2, 2, length, 5), (2, 2, length, 3)
        q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
        heads, _ = sparse_attend(q, k, v, grid, scale=0.4, causal=causal, valid=valid)
        visible = visible_pairs(grid.sees(at.unsqueeze(-1), at), causal, valid)
        wanted, _ = dense_attend(q, k, v, visible, 0.4)
        weight = torch.randn_like(heads) * valid[:, None, :, None]
        torch.testing.assert_close(heads * weight, wanted * weight)
        gradients = (torch.autograd.grad((each * weight).sum(), [q, k, v]) for each in (heads, wanted))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_a_list_holds_the_surroundings_of_the_block_alone() -> None:
    layout, lists = grid_lists(Grid(32, (8, 8), (4, 4)), 1024, False, CPU)
    assert layout.shape == (8, 8)
    assert lists.places.shape == (16, 16 * 16)
    _, causal = grid_lists(Grid(32, (8, 8), (4, 4)), 1024, True, CPU)
    assert causal.places.shape == (16, 12 * 16)  # nothing below the block
    assert grid_lists(Grid(32, (8, 8), (90, 90)), 1024, False, CPU)[1].places.shape == (16, 1024)  # all that there is


def test_rectangles_are_neither_small_nor_large() -> None:
    assert GridLayout(Grid(64, (1, 2), (0, 0)), 4096).shape == (1, FEWEST)  # sixteen neighbours
    high, wide = GridLayout(Grid(64, (64, 64), (0, 0)), 4096).shape
    assert high * wide == MOST
    assert GridLayout(Grid(64, (8, 8), (0, 0)), 100).shape == (2, 16)  # there are two rows of the grid
