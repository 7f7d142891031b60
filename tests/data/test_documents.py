from collections.abc import Iterator

import numpy as np
import pytest

from mtkit.data.documents import Ragged, Segments, joined

BREAK = 999


def _segments(lengths: list[tuple[int, int]], documents: list[int]) -> Segments:
    """Segment i is made of pieces i."""
    sides = []
    for side in (0, 1):
        sizes = np.array([each[side] for each in lengths], dtype=np.int32)
        sides.append(Ragged(np.repeat(np.arange(len(sizes)), sizes).astype(np.int32), sizes))
    count = len(documents)
    return Segments(
        *sides,
        lines=np.arange(1, count + 1),
        documents=np.array(documents),
        corpora=np.zeros(count, np.int16),
        tasks=np.arange(count, dtype=np.int16),
    )


def _cut(whole: Segments, sizes: list[int]) -> Iterator[Segments]:
    begin = 0
    for size in sizes:
        yield whole.only((np.arange(len(whole)) >= begin) & (np.arange(len(whole)) < begin + size))
        begin += size


def _rows(side: Ragged) -> list[list[int]]:
    return [each.tolist() for each in np.split(side.flat, np.cumsum(side.lengths)[:-1])]


def _all(parts: list[tuple[Segments, np.ndarray]], tags: np.ndarray | None = None) -> list[tuple[list[int], list[int]]]:
    made = [part.rows(firsts, tags, BREAK) for part, firsts in parts]
    return [pair for rows in made for pair in zip(_rows(rows.source), _rows(rows.target), strict=True)]


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [2, 0, 3, 1], [5, 1]])
def test_segments_of_a_document_are_joined_up_to_the_budget_wherever_chunks_are_cut(sizes: list[int]) -> None:
    whole = _segments([(2, 1), (2, 1), (2, 1), (1, 4), (9, 1), (1, 1)], [7, 7, 7, 8, 8, 8])
    rows = _all(list(joined(_cut(whole, sizes), 5)))
    assert rows == [
        ([0, 0, BREAK, 1, 1], [0, BREAK, 1]),
        ([2, 2], [2]),
        ([3], [3, 3, 3, 3]),
        ([4] * 9, [4]),
        ([5], [5]),
    ]


def test_both_sides_have_the_same_breaks_and_every_segment_is_there_once() -> None:
    draw = np.random.default_rng(2)
    lengths = [(int(one), int(two)) for one, two in draw.integers(1, 12, (300, 2))]
    documents = np.cumsum(draw.random(300) < 0.1).tolist()
    parts = list(joined(_cut(_segments(lengths, documents), [50] * 6), 30))
    rows = _all(parts)
    split = [[[piece for piece in side if piece != BREAK] for side in row] for row in rows]
    assert sum(len(side) for row in split for side in row) == sum(map(sum, lengths))
    for source, target in rows:
        assert source.count(BREAK) == target.count(BREAK)
    longest = max(max(len(source), len(target)) for source, target in rows)
    assert 25 < longest <= 30


def test_rows_carry_their_first_segments_line_and_tag() -> None:
    whole = _segments([(1, 1), (1, 1), (1, 1)], [0, 0, 1])
    rows = whole.rows(np.array([0, 2]), np.array([50, 51, 52]), BREAK)
    assert _rows(rows.source) == [[50, 0, BREAK, 1], [52, 2]]
    assert _rows(rows.target) == [[0, BREAK, 1], [2]]
    assert rows.lines.tolist() == [1, 3]
