"""Binary partition: walks cover everything once, and lists beside blocks of tokens hold just what the walks take."""

import pytest
import torch

from mtkit.attention.sparse._binary_partition import (
    BLOCK,
    Edge,
    count,
    finished,
    finishing_order,
    label_of,
    labels_of,
    left_walk,
    right_walk,
    token_lists,
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 9, 40])
@pytest.mark.parametrize("clip", [0, 2, 20])
def test_lists_hold_what_the_walks_take_and_their_labels(k: int, clip: int, causal: bool) -> None:
    for length in (*LENGTHS, 7 * BLOCK + 5):
        lists = token_lists(length, k, clip, causal, torch.device("cpu"))
        levels = range(top(length, k, causal=causal) + 1)
        first = [sum(count(length, below, complete=causal) for below in range(level)) for level in levels]
        rows = lists.labels.flatten(0, 1)[:length]
        assert int(rows.max()) <= labels_of(k, clip)
        for i, row in enumerate(rows):
            places = lists.places[i // lists.labels.shape[1]]
            seen = row != labels_of(k, clip)
            taken = sorted(zip(places[seen].tolist(), row[seen].tolist(), strict=True))
            wanted = [(i, 0)]
            for right in (False,) if causal else (False, True):
                for e in walk(i, k, length, right):
                    wanted.append((first[e.level] + e.place, label_of(e.walked, e.slot, right, k, clip)))
            assert taken == sorted(wanted)


def test_lists_stay_short_and_are_made_once() -> None:
    short, long = (token_lists(length, 4, 3, True, torch.device("cpu")) for length in (1 << 10, 1 << 14))
    assert long.places.shape[1] - short.places.shape[1] <= 4 * (4 + 2), "no more than k + 2 nodes for each level"
    assert token_lists(1 << 14, 4, 3, True, torch.device("cpu")) is long


def test_nodes_are_numbered_in_the_order_in_which_they_end() -> None:
    nodes = [(level, ((t + 1) >> level) - 1) for t in range(100) for level in range(finished(t) + 1)]
    assert [finishing_order(*node) for node in nodes] == list(range(len(nodes)))
