"""A pattern as lists: the listed engine gives what a dense mask gives, forward and backward."""

import pytest
import torch

from mtkit.attention.engines.blocks.listed import attend_listed
from mtkit.attention.engines.blocks.pattern import Band, Blocks, Columns, Comb, Pattern, Rows
from mtkit.attention.engines.blocks.pattern_lists import BLOCK, pattern_lists
from mtkit.attention.engines.blocks.random_pattern import Random, RandomBlocks
from mtkit.attention.engines.blocks.sparse import dense_attend, visible_pairs

CPU = torch.device("cpu")
PATTERNS = {
    "band": Band(3, 2),
    "dilated": Band(2, 1, dilation=3) | Columns(2),
    "far": Band(1, 1, dilation=40) | Band(0, 0),
    "strided": Band(None, None, dilation=7),
    "comb": Blocks(6) | Comb(6, first=4, count=2),
    "random": Band(2, 2) | RandomBlocks(2, heads=1, key=3, block=4, lengths=torch.tensor([30])),
    "nothing for some": Comb(50, first=49, count=1),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK + 5])
def test_lists_give_what_a_dense_mask_gives(name: str, causal: bool, length: int) -> None:
    pattern: Pattern = PATTERNS[name]
    q, k, v = (torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    valid = torch.arange(length) < torch.tensor([[length], [(length + 1) // 2]])
    lists = pattern_lists(pattern, length, causal, CPU)
    table = q.new_zeros(2, 3, length, 1)
    heads = attend_listed(q, k, v, table, lists, missing=None if causal else ~valid, scale=0.4)
    at = torch.arange(length)
    visible = visible_pairs(pattern.sees(at.unsqueeze(-1), at), causal, valid)
    wanted, _ = dense_attend(q, k, v, visible, 0.4)
    weight = torch.randn_like(heads) * valid[:, None, :, None]
    torch.testing.assert_close(heads * weight, wanted * weight)
    gradients = (torch.autograd.grad((each * weight).sum(), [q, k, v]) for each in (heads, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_list_is_no_longer_than_what_a_block_of_queries_sees() -> None:
    assert pattern_lists(Band(3, 2), 10 * BLOCK, False, CPU).places.shape == (10, BLOCK + 5)
    dilated = Band(2, 2, dilation=50) | Columns(1)
    assert pattern_lists(dilated, 10 * BLOCK, True, CPU).places.shape == (10, 3 * BLOCK + 1)


def test_what_no_list_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="by themselves"):
        pattern_lists(Band(1, 1) | Rows(2), 9, False, CPU)
    with pytest.raises(ValueError, match="same for all heads"):
        pattern_lists(Random(2, heads=2, key=1), 9, True, CPU)
