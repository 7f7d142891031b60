from dataclasses import replace

import numpy as np
import pytest

from mtkit.data.documents import joined
from mtkit.data.prepared import Side, Tokens

BREAK = 99_999


def side_of(lengths: list[tuple[int, int]], documents: list[int], *, gap_before: int | None = None) -> Side:
    """Segment i is made of pieces i, with a break behind; at `gap_before` another record batch begins."""
    columns = []
    for which in (0, 1):
        flat: list[int] = []
        starts = []
        for number, each in enumerate(lengths):
            flat += [-1] * 5 * (number == gap_before)
            starts.append(len(flat))
            flat += [number] * each[which] + [BREAK]
        sizes = np.array([each[which] for each in lengths], dtype=np.int32)
        columns.append(Tokens(np.array(flat, dtype=np.int32), np.array(starts), sizes))
    count = len(documents)
    return Side(
        *columns,
        lines=np.arange(1, count + 1),
        source_text=None,
        target_text=None,
        tasks=np.array(documents, dtype=np.int16) % 2,
        corpora=np.array(documents, dtype=np.int16) % 3,
        documents=np.array(documents),
    )


def rows_of(side: Side) -> list[tuple[list[int], list[int]]]:
    return [(side.source[row].tolist(), side.target[row].tolist()) for row in range(len(side))]


@pytest.fixture(scope="module")
def book() -> Side:
    """20,000 segments of 1 to 11 pieces in documents of about 2,000."""
    draw = np.random.default_rng(2)
    lengths = [(int(one), int(two)) for one, two in draw.integers(1, 12, (20_000, 2))]
    return side_of(lengths, np.cumsum(draw.random(20_000) < 0.0005).tolist())


def test_every_segment_is_in_one_row_between_breaks_and_rows_keep_to_the_budget(book: Side) -> None:
    side = joined(book, 100, seed=1, epoch=0)
    assert book.documents is not None
    expected = []
    for (source, target), line, document in zip(rows_of(side), side.lines, side.documents, strict=True):
        segments = list(dict.fromkeys(piece for piece in source if piece != BREAK))
        assert segments == list(range(line - 1, line - 1 + len(segments)))
        assert set(book.documents[segments]) == {document}
        assert source.count(BREAK) == target.count(BREAK) == len(segments) - 1
        assert max(len(source), len(target)) <= 100
        for which, own in ((book.source, source), (book.target, target)):
            pieces = [piece for number in segments for piece in [*which[number].tolist(), BREAK]][:-1]
            assert own == pieces
        expected += segments
    assert expected == list(range(20_000))


def test_each_doubling_of_the_length_gets_as_much_of_the_text_and_so_do_single_segments(book: Side) -> None:
    """Segments of 7.7 pieces on the longer side, up to 15 and a half of 1,000."""
    side = joined(book, 1_000, seed=1, epoch=0)
    lengths = np.maximum(side.source.lengths, side.target.lengths)
    share = np.histogram(lengths, bins=[0, 15, 31, 62, 125, 250, 500, 1_001], weights=lengths)[0] / lengths.sum()
    assert share.min() > 0.07
    assert share.max() < 0.25
    alone = np.diff(np.append(side.lines - 1, len(book))) == 1
    assert 0.08 < lengths[alone].sum() / lengths.sum() < 0.25


def test_each_epoch_has_other_rows_and_the_same_ones_again(book: Side) -> None:
    def lines(seed: int, epoch: int) -> list[int]:
        return joined(book, 100, seed=seed, epoch=epoch).lines.tolist()

    assert lines(1, 0) == lines(1, 0)
    assert len({tuple(lines(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_a_segment_longer_than_the_budget_is_a_row_of_its_own() -> None:
    lengths = [(2, 2), (30, 1), (2, 2), (1, 40), (2, 2)]
    side = joined(side_of(lengths, [0] * 5), 20, seed=1, epoch=0)
    assert rows_of(side) == [([number] * one, [number] * two) for number, (one, two) in enumerate(lengths)]


def test_neither_documents_nor_what_is_apart_in_the_file_are_joined() -> None:
    whole = side_of([(1, 1)] * 40, [0] * 20 + [1] * 20, gap_before=30)
    longest = 0
    for epoch in range(300):
        side = joined(whole, 1_000, seed=1, epoch=epoch)
        longest = max(longest, *side.source.lengths.tolist())
        assert {1, 21, 31} <= set(side.lines.tolist())
        assert all(-1 not in source for source, _ in rows_of(side))
        assert side.tasks is not None
        assert side.corpora is not None
        assert side.tasks.tolist() == side.corpora.tolist() == [int(line > 20) for line in side.lines]
    assert longest == 20 + 19


def test_a_side_without_documents_stays_as_it_is(book: Side) -> None:
    alone = replace(book, documents=None)
    assert joined(alone, 100, seed=1, epoch=0) is alone
