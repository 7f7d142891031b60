from itertools import pairwise

import pytest

from tests.data.builtin.drawing import pairs_of


def test_copy_and_reverse() -> None:
    assert all(target == source for source, target in pairs_of("copy"))
    for source, target in pairs_of("reverse"):
        assert [source[len(source) - 1 - place] for place in range(len(source))] == target


@pytest.mark.parametrize("vocabulary", [26, 1000])
def test_sort(vocabulary: int) -> None:
    for source, target in pairs_of("sort", options={"vocabulary": vocabulary}):
        assert all(one <= other for one, other in pairwise(target))
        assert {word: source.count(word) for word in source} == {word: target.count(word) for word in target}


@pytest.mark.parametrize("places", [1, 3, 50])
def test_shift(places: int) -> None:
    for source, target in pairs_of("shift", options={"places": places}):
        assert [source[(place + places) % len(source)] for place in range(len(source))] == target


def test_nth() -> None:
    for source, target in pairs_of("nth", options={"queries": 3}):
        positions, _, sequence = " ".join(source).partition(" : ")
        numbers = [int(number.replace(" ", "")) for number in positions.split(" , ")]
        assert [sequence.split()[number - 1] for number in numbers] == target
        assert len(target) == 3


def test_a_large_vocabulary_is_used() -> None:
    pairs = pairs_of("copy", size=20_000, options={"vocabulary": 30})
    assert {word for source, _ in pairs for word in source} == {f"{number:02d}" for number in range(30)}
