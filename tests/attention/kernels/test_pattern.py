"""The algebra of patterns: predicates, their union, and what decoding keeps."""

import pytest
import torch

from mtkit.attention.kernels.grid import Grid
from mtkit.attention.kernels.pattern import Band, Blocks, Columns, Comb, Flanked, Pattern, Rows
from mtkit.attention.kernels.random_pattern import Random, RandomBlocks
from mtkit.attention.kernels.reproducible import random_key

LENGTH = 23
PATTERNS: dict[str, Pattern] = {
    "band": Band(3, 2),
    "dilated": Band(2, 1, dilation=3),
    "strided": Band(None, None, dilation=4),
    "blocks": Blocks(4, back=1, ahead=1),
    "flanked": Flanked(4, back=3, ahead=6),
    "grid": Grid(5, block=(2, 3), margin=(1, 1)),
    "columns": Columns(2),
    "rows": Rows(3),
    "comb": Comb(5, first=3, count=2),
    "random": Random(4, heads=2, key=random_key(1, 2)),
    "random-blocks": RandomBlocks(2, heads=2, key=3, block=3, apart=2, first=1),
    "union": Band(1, 1) | Blocks(5) | Columns(2) | Rows(2) | Random(3, heads=2, key=5),
}


def matrix(pattern: Pattern, length: int = LENGTH) -> torch.Tensor:
    """The pairs seen, (..., T, T)."""
    at = torch.arange(length)
    return pattern.sees(at.unsqueeze(-1), at)


def test_members_see_what_their_definitions_say() -> None:
    for i in range(LENGTH):
        for j in range(LENGTH):
            assert matrix(PATTERNS["band"])[i, j] == (-3 <= j - i <= 2)
            assert matrix(PATTERNS["dilated"])[i, j] == ((j - i) in (-6, -3, 0, 3))
            assert matrix(PATTERNS["strided"])[i, j] == ((i - j) % 4 == 0)
            assert matrix(PATTERNS["blocks"])[i, j] == (abs(i // 4 - j // 4) <= 1)
            assert matrix(PATTERNS["flanked"])[i, j] == (i // 4 * 4 - 3 <= j < i // 4 * 4 + 10)
            rows, columns = (range(at // n * n - 1, at // n * n + n + 1) for at, n in ((i // 5, 2), (i % 5, 3)))
            assert matrix(PATTERNS["grid"])[i, j] == (j // 5 in rows and j % 5 in columns)
            assert matrix(PATTERNS["columns"])[i, j] == (j < 2)
            assert matrix(PATTERNS["rows"])[i, j] == (i < 3)
            assert matrix(PATTERNS["comb"])[i, j] == (j % 5 >= 3)


def test_a_union_sees_what_any_member_sees() -> None:
    one, other = Band(1, 0, dilation=2), Blocks(5)
    assert torch.equal(matrix(one | other), matrix(one) | matrix(other))
    assert torch.equal(matrix(one | other | one), matrix(other | one))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_only_a_pattern_that_shows_everything_covers(name: str, causal: bool) -> None:
    if name in ("random", "random-blocks", "union") and not causal:
        return  # drawn from the keys before the query, these are for causal queries
    for length in (1, 2, 3, 4, 5, 9):
        seen = matrix(PATTERNS[name], length)
        whole = bool((seen | ~torch.ones_like(seen).tril()).all() if causal else seen.all())
        assert not PATTERNS[name].covers(length, causal) or whole


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        (Band(4, 4), 5),
        (Blocks(5), 5),
        (Columns(5), 5),
        (Rows(5), 5),
        (Comb(9, 0, 5), 5),
        (Flanked(2, 4, 3), 5),
        (Grid(5, (1, 2), (0, 4)), 5),
        (Grid(2, (1, 2), (2, 0)), 6),
    ],
)
def test_the_limits_cover(pattern: Pattern, length: int) -> None:
    assert pattern.covers(length, causal=False)
    assert not pattern.covers(length + 1, causal=False)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_step_reads_the_keys_seen_and_they_are_still_kept(name: str) -> None:
    pattern = PATTERNS[name]
    seen = matrix(pattern).tril()
    seen = seen.flatten(0, -3) if seen.dim() > 2 else seen[None]
    first, window = pattern.kept
    for i in range(LENGTH):
        keys = pattern.keys(range(i, i + 1), i + 1)
        assert [sorted(head) for head in keys] == [head[i].nonzero().flatten().tolist() for head in seen]
        assert all(key < first or window is None or key > i - window for head in keys for key in head)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_keys_of_several_queries_are_all_that_any_of_them_sees(name: str, causal: bool) -> None:
    seen = matrix(PATTERNS[name]).tril() if causal else matrix(PATTERNS[name])
    heads = seen.flatten(0, -3) if seen.dim() > 2 else seen[None]
    for first in range(0, LENGTH, 4):
        block = range(first, min(first + 4, LENGTH))
        lists = PATTERNS[name].keys(block, block.stop if causal else LENGTH)
        assert len(lists) == len(heads)
        for keys, head in zip(lists, heads, strict=True):
            assert len(set(keys)) == len(keys)
            assert set(head[first : block.stop].any(0).nonzero().flatten().tolist()) <= set(keys)
            assert all(0 <= key < LENGTH for key in keys)
