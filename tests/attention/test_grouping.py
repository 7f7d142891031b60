"""Groups of positions: ranks, blocks, and the lists that decoding keeps."""

import torch

from mtkit.attention import reorder
from mtkit.attention.grouping import enlist, enlisted, in_blocks, rank_in_group, rows_at, start_lists


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


def test_lists_keep_the_last_members_of_each_group_of_each_hypothesis() -> None:
    most, groups = 5, 3
    lists = start_lists(1, 2, 1, groups, torch.zeros(()))
    history: list[list[int]] = [[], []]
    for position in range(30):
        group = torch.randint(0, groups, (1, 2, 1))
        lists = enlist(lists, group, position, most)
        for hypothesis in range(2):
            history[hypothesis].append(group[0, hypothesis, 0].item())  # type: ignore[arg-type]
        if position == 11:
            lists, history = reorder(lists, torch.tensor([[1, 1]])), [list(history[1]), list(history[1])]
        for each in range(groups):
            members, rank = enlisted(lists, torch.full((1, 2, 1), each))
            for hypothesis, past in enumerate(history):
                mine = [i for i, g in enumerate(past) if g == each]
                found = zip(rank[0, hypothesis, 0].tolist(), members[0, hypothesis, 0].tolist(), strict=True)
                assert sorted(pair for pair in found if pair[0] >= 0) == list(enumerate(mine))[-most:]
    assert lists["members"].shape == (1, 2, 1, groups, most)
