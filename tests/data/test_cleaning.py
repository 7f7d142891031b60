import numpy as np
import pytest

from mtkit.data.cleaning import REASONS, Repeats, Seen, examine, left_out, pair_hashes
from mtkit.recipe.data import Cleaning
from mtkit.text.segments import mix
from mtkit.text.tokenizer import UNK
from tests.text.test_segments import ragged

Pairs = list[tuple[list[int], list[int]]]


def hashes_of(direction: str, pairs: Pairs, texts: list[tuple[str, str]] | None = None) -> list[int]:
    """Of pieces counted from the first that stands for text; `texts` where some are unknown."""
    source, target = (ragged(*([each + 4 for each in pair[side]] for pair in pairs)) for side in (0, 1))
    texts = texts or [("", "")] * len(pairs)
    found: list[int] = pair_hashes(direction, source, target, *zip(*texts, strict=True)).tolist()
    return found


def test_hashes_are_of_direction_and_pieces_and_their_places() -> None:
    pairs: Pairs = [([1, 2], [3]), ([1], [2, 3]), ([2, 1], [3]), ([3], [1, 2]), ([], [1, 2, 3]), ([1, 2, 3], [])]
    pairs += [([], []), ([1, 2, 2], [3]), ([2, 2, 1], [3]), ([1, 1], []), ([], [1, 1]), ([0], []), ([0, 0], [])]
    once = hashes_of("en-de", pairs)
    assert len({*once, *hashes_of("en-fr", pairs)}) == 2 * len(pairs)
    assert hashes_of("en-de", pairs[::-1]) == once[::-1]


def test_pairs_with_unknown_pieces_are_told_by_their_text() -> None:
    pairs: Pairs = [([5, UNK - 4], [6]), ([5, UNK - 4], [6]), ([5, UNK - 4], [6]), ([5], [6])]
    texts = [("ask 鑫", "frag"), ("ask 淼", "frag"), (" ask  鑫", "frag "), ("ask", "frag")]
    one, other, spaced, plain = hashes_of("en-de", pairs, texts)
    assert one == spaced
    assert len({one, other, plain}) == 3
    assert plain == hashes_of("en-de", pairs[3:])[0]


@pytest.mark.parametrize("unknown", [0, 1])
def test_pairs_with_unknown_pieces_are_told_by_the_text_of_both_sides(unknown: int) -> None:
    pair = ([UNK - 4], [6]) if unknown == 0 else ([6], [UNK - 4])
    texts = [("a", "b"), ("a", "c"), ("d", "b"), ("a b", ""), ("", "a b")]
    assert len({*hashes_of("en-de", [pair] * len(texts), texts)}) == len(texts)


def test_hashes_of_many_pairs_are_spread_over_64_bits() -> None:
    rows = [[4 + number // 300, 4 + number % 300] for number in range(90_000)]
    texts = [""] * len(rows)
    hashes = pair_hashes("en-de", ragged(*rows), ragged(*[[7]] * len(rows)), texts, texts)
    assert len(np.unique(hashes)) == len(rows)
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.01


def test_seen_knows_what_a_set_knows_whatever_the_chunks() -> None:
    draw = np.random.default_rng(1)
    edges = np.arange(64, dtype=np.uint64) << np.uint64(58)
    values = np.unique(np.concatenate([np.arange(400, dtype=np.uint64), edges, edges - 1, mix(edges)]))
    seen, known = Seen(), set()
    for size in (1, 1, 5, 200, 3, 1000, 2, 40):
        hashes = draw.choice(values[::2], size)
        expected = []
        for each in hashes.tolist():
            expected.append(each in known)
            known.add(each)
        assert seen.add(hashes).tolist() == expected
    held = seen.hold(values)
    assert held.tolist() == [each in known for each in values.tolist()]
    assert 100 < held.sum() < len(values)
    assert seen.hold(values[:0]).tolist() == []


@pytest.mark.parametrize("at_once", [3, 100, 1 << 21])
def test_repeats_are_what_is_seen_on_the_way(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.cleaning._AT_ONCE", at_once)
    draw = np.random.default_rng(1)
    edges = np.arange(64, dtype=np.uint64) << np.uint64(58)
    values = np.concatenate([np.arange(100, dtype=np.uint64), edges, edges - 1, mix(edges)])
    stream = [draw.choice(values, size) for size in (1, 0, 7, 200, 64, 3)]
    readings = list[str]()

    def progress(items, what, total):  # type: ignore[no-untyped-def]
        readings.extend([what] * total)
        return items

    repeats, seen = Repeats(lambda: iter(stream), progress), Seen()
    assert len(readings) == -(-275 // at_once)
    found = [repeats.add(each).tolist() for each in stream]
    assert found == [seen.add(each).tolist() for each in stream]
    assert 50 < sum(map(sum, found)) < 225
    assert Repeats(lambda: iter(())).add(values[:0]).tolist() == []


def _found(settings: Cleaning) -> dict[str, np.ndarray]:
    #           plain empty test twice twice same  ratio long
    hashes = np.array([1, 2, 3, 4, 4, 5, 6, 7], dtype=np.uint64)
    source = np.array([9, 0, 9, 9, 9, 9, 50, 90])
    target = np.array([9, 5, 9, 9, 9, 9, 10, 50])
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


def test_the_ratio_is_that_of_the_settings() -> None:
    ratios = [_found(Cleaning(length_ratio=ratio))["length_ratio"].sum() for ratio in (None, 4.9, 5.1)]
    assert ratios == [1, 1, 0]  # one pair has sides of 50 and 10 pieces
