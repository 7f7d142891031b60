"""The strided Sparse Transformer: the catalogue's two patterns, shared out in three ways, and their limits."""

import pytest
import torch

from mtkit.attention import Attention
from mtkit.errors import MtkitError
from tests.attention.sparse.literal import agrees, is_full, kept, make, reached

ROLES = ["encoder", "decoder"]


def near(stride: int, i: int, j: int) -> bool:
    return i - stride <= j <= i + stride


def far(stride: int, i: int, j: int) -> bool:
    return (i - j) % stride == 0


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stride", [3, 6])
def test_it_is_the_equation(role: str, stride: int) -> None:
    agrees(make("sparse-strided", role, stride=stride), lambda head, i, j: (near, far)[head // 2](stride, i, j))
    merged = make("sparse-strided", role, stride=stride, sparse_heads="merge")
    agrees(merged, lambda head, i, j: near(stride, i, j) or far(stride, i, j))
    for layer, kind in enumerate((near, far, near)):
        alternating = make("sparse-strided", role, stride=stride, sparse_heads="alternate", layer=layer, layers=3)
        agrees(alternating, lambda head, i, j, kind=kind: kind(stride, i, j))  # type: ignore[misc]


@pytest.mark.parametrize("role", ROLES)
def test_a_stride_of_the_length_merged_or_of_one_is_full_attention(role: str) -> None:
    is_full(make("sparse-strided", role, stride=37, sparse_heads="merge"))
    is_full(make("sparse-strided", role, stride=1, sparse_heads="merge"))


def test_merged_a_token_reaches_window_and_stride_once() -> None:
    attention = make("sparse-strided", "decoder", stride=7, sparse_heads="merge")
    assert reached(attention, 20) == {*range(20, 28), 34, 41, 48, 55}


@pytest.mark.parametrize("name", ["sparse-strided", "sparse-fixed"])
@pytest.mark.parametrize("how", ["merge", "alternate"])
@torch.no_grad()
def test_two_hops_reach_the_whole_past(name: str, how: str) -> None:
    """The paper's reason for the two patterns: an influence of each token on the last through two layers."""
    layers: list[Attention] = [
        make(name, "decoder", stride=6, sparse_heads=how, layer=layer, layers=2) for layer in range(2)
    ]
    x = torch.randn(1, 36, 16, dtype=torch.float64)

    def last(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + layer(x).output
        return x[0, -1]

    for position in range(36):
        other = x.clone()
        other[:, position] += 1
        assert (last(other) - last(x)).abs().max() > 1e-9, position


def test_decoding_keeps_a_window_for_the_near_heads() -> None:
    attention = make("sparse-strided", "decoder", stride=9)
    assert 10 + 100 <= kept(attention, 100) <= 10 + 150


def test_one_head_cannot_be_split() -> None:
    with pytest.raises(MtkitError, match="sparse_heads = 'split' must be merge or alternate"):
        make("sparse-strided", "encoder", heads=1)
    make("sparse-strided", "encoder", heads=1, sparse_heads="merge")
