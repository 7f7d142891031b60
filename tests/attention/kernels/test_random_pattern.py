"""Patterns drawn at random: pure functions of key, head and position, within their limits, and evenly spread."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.pattern import Band
from mtkit.attention.kernels.random_pattern import LastBlocks, Random, RandomBlocks
from mtkit.attention.kernels.reproducible import random_key
from tests.contract.counting import count


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


@pytest.mark.parametrize(("apart", "first", "last"), [(0, 0, 0), (2, 1, 0), (2, 1, 1), (1, 0, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_are_distinct_candidates_and_all_of_them_where_there_are_few(
    apart: int, first: int, last: int, causal: bool
) -> None:
    lengths = torch.tensor([61, 20, 4])
    pattern = RandomBlocks(3, 2, 7, block=4, apart=apart, first=first, last=last, lengths=None if causal else lengths)
    picks = pattern.picks(torch.arange(16))
    assert picks.shape == (1 if causal else 3, 2, 16, 3)
    for segment, heads in enumerate(picks.tolist()):
        end = -(-int(lengths[segment]) // 4) - last
        for blocks in heads:
            for own, chosen in enumerate(blocks):
                candidates = [each for each in range(first, own + 1 if causal else end) if abs(each - own) >= apart]
                real = [each for each in chosen if each >= 0]
                assert len(set(real)) == len(real) == min(3, len(candidates))
                assert set(real) <= set(candidates)


@pytest.mark.parametrize("lengths", [None, torch.tensor([17, 6, 0])])
@pytest.mark.parametrize("kind", [Random, RandomBlocks, LastBlocks])
def test_the_mask_of_whole_sequences_holds_what_each_query_sees(kind: type, lengths: Tensor | None) -> None:
    if kind is LastBlocks and lengths is None:
        return
    options = {} if kind is Random else {"block": 4}
    pattern = kind(3, heads=2, key=5, lengths=lengths, **options)
    for queries, keys in ((17, 17), (9, 17), (17, 9), (1, 1)):
        i, j = torch.arange(queries).unsqueeze(-1), torch.arange(keys)
        assert torch.equal(pattern.mask(i, j), pattern.sees(i, j))
        union = pattern | Band(2, 1)
        assert torch.equal(union.mask(i, j), union.sees(i, j))


def test_the_mask_of_whole_sequences_compares_no_pick_with_each_key() -> None:
    i, j = torch.arange(64).unsqueeze(-1), torch.arange(64)
    counted, _ = count(lambda: Random(16, heads=2, key=5).mask(i, j))
    assert counted.largest == 2 * 64 * 65


def test_random_blocks_depend_on_nothing_but_key_head_and_position() -> None:
    pattern = RandomBlocks(2, heads=2, key=3, block=4)
    picks = pattern.picks(torch.arange(40))
    assert torch.equal(picks[:, :, 30:], pattern.picks(torch.arange(30, 40)))
    assert not torch.equal(picks[:, 0], picks[:, 1])
    assert not torch.equal(picks, RandomBlocks(2, heads=2, key=4, block=4).picks(torch.arange(40)))


def test_random_blocks_are_spread_evenly() -> None:
    picks = RandomBlocks(3, 4, 9, block=2, lengths=torch.tensor([32])).picks(torch.arange(2000))
    counts = torch.bincount(picks.flatten(), minlength=16).float()
    assert counts.std() / counts.mean() < 0.06  # 1500 each
