"""The lists of members that decoding keeps."""

import torch

from mtkit.attention import reorder
from mtkit.attention.content._member_lists import enlist, enlisted, start_lists


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
