"""Binary partition: walks cover everything once, and windows hold just what the walks take."""

import pytest
import torch

from mtkit.attention.binary_partition import (
    SHORTEST_BLOCK,
    Edge,
    Window,
    count,
    finished,
    finishing_order,
    left_walk,
    right_walk,
    top,
)

LENGTHS = (1, 2, 3, 7, 16, 17, 33, 69)


def walk(i: int, k: int, length: int, right: bool) -> list[Edge]:
    """What is not empty of it."""
    edges = list(right_walk(i, k, length) if right else left_walk(i, k))
    return [edge for edge in edges if edge.place << edge.level < length]


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_a_walk_covers_its_side_once_by_few_nodes(k: int, right: bool) -> None:
    for length in LENGTHS:
        for i in range(length):
            edges = walk(i, k, length, right)
            spans = [range(e.place << e.level, min((e.place + 1) << e.level, length)) for e in edges]
            side = range(i + 1, length) if right else range(i)
            assert sorted(each for span in spans for each in span) == list(side)
            assert len(edges) <= k * (1 + length.bit_length())
            assert max((e.level for e in edges), default=0) <= top(length, k, causal=not right)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_windows_hold_what_the_walks_take(k: int, right: bool) -> None:
    for length in LENGTHS:
        highest = top(length, k, causal=False)
        padded = length + -length % max(SHORTEST_BLOCK, 1 << highest)
        taken: list[list[Edge]] = [[] for _ in range(length)]
        for level in range(highest + 1):
            window = Window(level, k, right)
            seen, walked, slot = window.edges(padded, torch.device("cpu"))
            numbered = torch.arange(1, count(length, level) + 1).view(1, 1, -1, 1)
            place = window.nodes(numbered, padded // window.block)[0, 0, :, :, 0].repeat_interleave(window.block, 0) - 1
            for i, column in (seen & (place >= 0))[:length].nonzero().tolist():
                taken[i].append(Edge(level, *(int(each[i, column]) for each in (place, walked, slot))))
        for i in range(length):
            assert sorted(taken[i]) == sorted(walk(i, k, length, right))


def test_nodes_are_numbered_in_the_order_in_which_they_end() -> None:
    nodes = [(level, ((t + 1) >> level) - 1) for t in range(100) for level in range(finished(t) + 1)]
    assert [finishing_order(*node) for node in nodes] == list(range(len(nodes)))
