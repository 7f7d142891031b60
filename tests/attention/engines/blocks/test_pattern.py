"""The algebra of patterns: predicates, their union, and what decoding keeps."""

import pytest
import torch

from mtkit.attention.engines.blocks.pattern import Band, Blocks, Columns, Pattern, Random, Rows
from mtkit.attention.hashing import random_key

LENGTH = 23
PATTERNS: dict[str, Pattern] = {
    "band": Band(3, 2),
    "dilated": Band(2, 1, dilation=3),
    "strided": Band(None, None, dilation=4),
    "blocks": Blocks(4, back=1, ahead=1),
    "columns": Columns(2),
    "rows": Rows(3),
    "random": Random(4, heads=2, key=random_key(1, 2)),
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
            assert matrix(PATTERNS["columns"])[i, j] == (j < 2)
            assert matrix(PATTERNS["rows"])[i, j] == (i < 3)


def test_a_union_sees_what_any_member_sees() -> None:
    one, other = Band(1, 0, dilation=2), Blocks(5)
    assert torch.equal(matrix(one | other), matrix(one) | matrix(other))
    assert torch.equal(matrix(one | other | one), matrix(other | one))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_only_a_pattern_that_shows_everything_covers(name: str, causal: bool) -> None:
    if name in ("random", "union") and not causal:
        return  # drawn from the keys before the query, these are for causal queries
    for length in (1, 2, 3, 4, 5, 9):
        seen = matrix(PATTERNS[name], length)
        whole = bool((seen | ~torch.ones_like(seen).tril()).all() if causal else seen.all())
        assert not PATTERNS[name].covers(length, causal) or whole


@pytest.mark.parametrize(("pattern", "length"), [(Band(4, 4), 5), (Blocks(5), 5), (Columns(5), 5), (Rows(5), 5)])
def test_the_limits_cover(pattern: Pattern, length: int) -> None:
    assert pattern.covers(length, causal=False)
    assert not pattern.covers(length + 1, causal=False)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_step_reads_the_keys_seen_and_they_are_still_kept(name: str) -> None:
    pattern = PATTERNS[name]
    seen = matrix(pattern).tril()
    seen = seen.flatten(0, -3).any(0) if seen.dim() > 2 else seen
    first, window = pattern.kept
    for i in range(LENGTH):
        keys = list(pattern.keys(i))
        assert sorted(keys) == seen[i].nonzero().flatten().tolist()
        assert all(key < first or window is None or key > i - window for key in keys)


def test_random_picks_depend_on_nothing_but_key_head_and_position() -> None:
    pattern = Random(4, heads=2, key=random_key(1, 2))
    picks = pattern.picks(torch.arange(50))
    assert torch.equal(picks[:, :, 30:], pattern.picks(torch.arange(30, 50)))
    assert not torch.equal(picks, Random(4, heads=2, key=random_key(1, 3)).picks(torch.arange(50)))
    assert not torch.equal(picks[:, 0], picks[:, 1])


def test_random_picks_are_distinct_and_below_their_limit() -> None:
    lengths = torch.tensor([40, 7, 3])
    for picks, limit in (
        (Random(4, 2, 1).picks(torch.arange(40)), torch.arange(1, 41)),
        (Random(4, 2, 1, lengths).picks(torch.arange(40)), lengths.view(-1, 1, 1)),
    ):
        assert (picks < limit.unsqueeze(-1)).all()
        real = picks.where(picks >= 0, -1 - torch.arange(4))
        assert (real.sort(-1).values.diff(dim=-1) != 0).all()
        few = (limit <= 4).expand(picks.shape[:-1])
        assert torch.equal((picks >= 0).sum(-1)[few], limit.expand(picks.shape[:-1])[few])  # all there are


def test_random_picks_are_spread_evenly() -> None:
    picks = Random(8, heads=4, key=9, lengths=torch.tensor([64])).picks(torch.arange(2000))
    counts = torch.bincount(picks[picks >= 0], minlength=64).float()
    assert counts.std() / counts.mean() < 0.06  # about 940 each: three binomial deviations are 0.1
