"""The fixed Sparse Transformer: the catalogue's two patterns, shared out in three ways, and their limits."""

import pytest
import torch

from tests.attention.sparse.literal import agrees, is_full, kept, make, reached

ROLES = ["encoder", "decoder"]


def near(length: int, i: int, j: int) -> bool:
    return i // length == j // length


def far(length: int, cells: int, j: int) -> bool:
    return j % length in range(length - cells, length)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("length", "cells"), [(5, 2), (8, 1), (4, 3)])
def test_it_is_the_equation(role: str, length: int, cells: int) -> None:
    options = {"stride": length, "sparse_c": cells}
    agrees(make("sparse-fixed", role, **options), lambda head, i, j: near(length, i, j) or far(length, cells, j))
    agrees(
        make("sparse-fixed", role, **options, sparse_heads="split"),
        lambda head, i, j: near(length, i, j) if head < 2 else far(length, cells, j),
    )
    for layer in range(2):
        agrees(
            make("sparse-fixed", role, **options, sparse_heads="alternate", layer=layer, layers=2),
            lambda head, i, j, layer=layer: far(length, cells, j) if layer else near(length, i, j),  # type: ignore[misc]
        )


@pytest.mark.parametrize("role", ROLES)
def test_a_block_for_all_or_all_cells_are_full_attention(role: str) -> None:
    is_full(make("sparse-fixed", role, stride=37, sparse_c=1))
    is_full(make("sparse-fixed", role, stride=6, sparse_c=6))
    is_full(make("sparse-fixed", role, stride=6, sparse_c=100))


@torch.no_grad()
def test_before_the_first_summary_the_far_heads_see_nothing() -> None:
    attention = make("sparse-fixed", "decoder", stride=6, sparse_c=2, sparse_heads="split")
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    own = attention.v_proj(x)  # type: ignore[operator]
    own[..., 8:] = 0  # the second half of the heads
    torch.testing.assert_close(attention(x).output, attention.out_proj(own))  # type: ignore[operator]


def test_only_summary_cells_reach_later_blocks() -> None:
    attention = make("sparse-fixed", "decoder", stride=8, sparse_c=2)
    assert reached(attention, 20) == set(range(20, 24))
    assert reached(attention, 22) == set(range(22, 60))


def test_decoding_keeps_a_block_for_the_near_heads() -> None:
    attention = make("sparse-fixed", "decoder", stride=8, sparse_c=2, sparse_heads="split")
    assert 8 + 100 <= kept(attention, 100) <= 8 + 150
