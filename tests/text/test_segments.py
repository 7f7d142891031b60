import numpy as np

from mtkit.text.segments import Ragged, Segments, mix, uniform


def ragged(*rows: list[int]) -> Ragged:
    flat = [piece for row in rows for piece in row]
    return Ragged(np.array(flat, dtype=np.int32), np.array([len(row) for row in rows], dtype=np.int32))


def rows_of(side: Ragged) -> list[list[int]]:
    assert side.flat.dtype == side.lengths.dtype == np.int32
    return [each.tolist() for each in np.split(side.flat, np.cumsum(side.lengths)[:-1])]


def segments() -> Segments:
    numbers = np.arange(3)
    return Segments(
        ragged([1, 2], [], [3]),
        ragged([4], [5, 6, 7], []),
        lines=numbers + 10,
        documents=numbers + 20,
        corpora=numbers.astype(np.int16),
        tasks=np.array([1, 0, 1], dtype=np.int16),
    )


def test_those_that_stay_keep_all_that_is_known_of_them() -> None:
    kept = segments().only(np.array([True, False, True]))
    assert (rows_of(kept.source), rows_of(kept.target)) == ([[1, 2], [3]], [[4], []])
    assert (kept.lines.tolist(), kept.documents.tolist()) == ([10, 12], [20, 22])
    assert (kept.corpora.tolist(), kept.tasks.tolist(), len(kept)) == ([0, 2], [1, 1], 2)


def test_sources_get_the_tag_of_their_direction_in_front() -> None:
    tagged = segments().with_tags(np.array([50, 51]))
    assert rows_of(tagged.source) == [[51, 1, 2], [50], [51, 3]]
    assert rows_of(tagged.target) == [[4], [5, 6, 7], []]


def test_both_sides_are_closed_by_the_same_mark() -> None:
    appended = segments().append(9)
    assert rows_of(appended.source) == [[1, 2, 9], [9], [3, 9]]
    assert rows_of(appended.target) == [[4, 9], [5, 6, 7, 9], [9]]


def test_neighbouring_numbers_mix_to_unlike_ones() -> None:
    values = mix(np.arange(10_000, dtype=np.uint64))
    assert len(np.unique(values)) == 10_000
    for bit in range(64):
        share = float(((values >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 0.03


def test_draws_are_even_and_differ_from_key_to_key_and_number_to_number() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    first, second = uniform(keys, 0), uniform(mix(keys), 1)
    for draws in (first, second):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=50, range=(0, 1))
        assert np.abs(counts - 400).max() < 6 * 20
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03
