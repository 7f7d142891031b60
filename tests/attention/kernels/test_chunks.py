"""Attention inside groups of positions: ranks, blocks, and the softmax of each block under masks of all shapes."""

import pytest
import torch

from mtkit.attention.kernels.chunks import attend_beside, in_blocks, rank_in_group, rows_at
from mtkit.attention.kernels.dot_product import safe_softmax


def test_a_rank_counts_the_earlier_members_of_the_same_group() -> None:
    group = torch.randint(0, 4, (2, 3, 40))
    rank = rank_in_group(group)
    for row, ranks in zip(group.flatten(0, 1).tolist(), rank.flatten(0, 1).tolist(), strict=True):
        assert ranks == [row[:i].count(each) for i, each in enumerate(row)]
    assert torch.equal(rank_in_group(group[..., :17]), rank[..., :17])


def test_blocks_hold_every_member_once_and_never_two_groups() -> None:
    for length, groups, size in ((40, 4, 3), (1, 5, 4), (7, 7, 1), (9, 2, 16)):
        group = torch.randint(0, groups + 1, (2, length))  # the last stands for none
        blocks = in_blocks(group, groups, size)
        for row in range(2):
            held = blocks.members[row][blocks.filled[row]].tolist()
            assert sorted(held) == (group[row] < groups).nonzero().flatten().tolist()
            for block, filled in zip(blocks.members[row], blocks.filled[row], strict=True):
                assert len(set(group[row][block[filled]].tolist())) <= 1
                assert block[filled].tolist() == sorted(block[filled].tolist())
            for i in range(length):
                if group[row, i] < groups:
                    assert blocks.members[row].flatten()[blocks.slot[row, i]] == i
            for each in set(group[row].tolist()) - {groups}:
                first = blocks.members[row, blocks.first[row, each], 0]
                assert first == group[row].tolist().index(each)


def test_rows_are_those_at_the_positions() -> None:
    x, position = torch.randn(2, 5, 3), torch.randint(0, 5, (2, 4, 6))
    assert torch.equal(rows_at(x, position)[1, 2, 3], x[1, position[1, 2, 3]])


@pytest.mark.parametrize("shape", [None, (1, 1, 5, 4, 6), (2, 1, 5, 1, 6), (2, 3, 5, 4, 6), (1, 3, 1, 4, 6)], ids=str)
def test_blocks_beside_keys_are_dense_softmaxes(shape: tuple[int, ...] | None) -> None:
    q, k = (torch.randn(2, 3, 5, size, 8, dtype=torch.float64, requires_grad=True) for size in (4, 6))
    v = torch.randn(2, 3, 5, 6, 7, dtype=torch.float64, requires_grad=True)
    visible = None if shape is None else torch.rand(shape) < 0.4  # some rows see nothing
    output = attend_beside(q, k, v, visible, scale=0.3)
    expected = safe_softmax(0.3 * q @ k.transpose(-1, -2), visible) @ v
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    ours, dense = (torch.autograd.grad((each * weight).sum(), (q, k, v)) for each in (output, expected))
    torch.testing.assert_close(ours, dense)
