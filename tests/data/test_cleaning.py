import numpy as np

from mtkit.data.cleaning import REASONS, Seen, examine, left_out, pair_hashes
from mtkit.data_settings import Cleaning


def test_hashes_are_of_direction_and_text_but_not_of_spaces() -> None:
    one = pair_hashes("en-de", ["a b", "a  b ", "a", "a b"], ["c", "c", "b c", "d"])
    assert one[0] == one[1]
    assert len(set(one.tolist())) == 3
    assert pair_hashes("en-fr", ["a b"], ["c"])[0] != one[0]
    assert one[0] == pair_hashes("en-de", ["a b"], ["c"])[0]


def test_seen_knows_what_a_set_knows_whatever_the_chunks() -> None:
    draw = np.random.default_rng(1)
    seen, known = Seen(), set()
    for size in (1, 1, 5, 200, 3, 1000, 2, 40):
        hashes = draw.integers(0, 900, size).astype(np.uint64)
        expected = []
        for each in hashes.tolist():
            expected.append(each in known)
            known.add(each)
        assert seen.add(hashes).tolist() == expected
    assert seen.hold(np.arange(1000, dtype=np.uint64)).tolist() == [each in known for each in range(1000)]


def _found(settings: Cleaning) -> dict[str, np.ndarray]:
    #           plain empty test twice twice same  ratio long
    hashes = np.array([1, 2, 3, 4, 4, 5, 6, 7], dtype=np.uint64)
    source = np.array([9, 0, 9, 9, 9, 9, 50, 90])
    target = np.array([9, 5, 9, 9, 9, 9, 10, 80])
    identical = np.array([False, False, False, False, False, True, False, False])
    held_out = Seen()
    held_out.add(np.array([3], dtype=np.uint64))
    return examine(hashes, identical, (source, target), settings, Seen(), held_out)


def test_each_reason_finds_its_pairs_and_only_them() -> None:
    found = _found(Cleaning(max_pieces=60))
    assert {reason: np.flatnonzero(pairs).tolist() for reason, pairs in found.items()} == {
        "empty": [1], "overlap": [2], "duplicates": [4], "identical": [5], "length_ratio": [6], "over_long": [7],
    }  # fmt: skip
    assert list(found) == list(REASONS)


def test_by_default_only_the_unusable_and_the_tested_go() -> None:
    gone = left_out(_found(Cleaning()), Cleaning())
    assert np.flatnonzero(np.logical_or.reduce(list(gone.values()))).tolist() == [1, 2]


def test_a_pair_goes_for_one_reason_only() -> None:
    every = Cleaning(duplicates=True, identical=True, length_ratio=3, max_pieces=8)
    found = _found(every)
    gone = left_out(found, every)
    assert sum(int(pairs.sum()) for pairs in gone.values()) == 8
    assert gone["over_long"].sum() < found["over_long"].sum()


def test_short_segments_have_no_ratio() -> None:
    lengths = (np.array([10, 11, 1]), np.array([1, 1, 11]))
    found = examine(np.arange(3, dtype=np.uint64), np.zeros(3, bool), lengths, Cleaning(), Seen(), None)
    assert found["length_ratio"].tolist() == [False, True, True]
