from dataclasses import replace

import numpy as np
import pytest

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Prepared, Side
from mtkit.data.resampling import Resegmentation, Sampler, join_documents, sampling_strength
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import EOS, UNK, Tokenizer

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
    side = join_documents(book, 100, seed=1, epoch=0)
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
    side = join_documents(book, 1_000, seed=1, epoch=0)
    lengths = np.maximum(side.source.lengths, side.target.lengths)
    share = np.histogram(lengths, bins=[0, 15, 31, 62, 125, 250, 500, 1_001], weights=lengths)[0] / lengths.sum()
    assert share.min() > 0.07
    assert share.max() < 0.25
    alone = np.diff(np.append(side.lines - 1, len(book))) == 1
    assert 0.08 < lengths[alone].sum() / lengths.sum() < 0.25


def test_each_epoch_has_other_rows_and_the_same_ones_again(book: Side) -> None:
    def lines(seed: int, epoch: int) -> list[int]:
        return join_documents(book, 100, seed=seed, epoch=epoch).lines.tolist()

    assert lines(1, 0) == lines(1, 0)
    assert len({tuple(lines(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_a_segment_longer_than_the_budget_is_a_row_of_its_own() -> None:
    lengths = [(2, 2), (30, 1), (2, 2), (1, 40), (2, 2)]
    side = join_documents(side_of(lengths, [0] * 5), 20, seed=1, epoch=0)
    assert rows_of(side) == [([number] * one, [number] * two) for number, (one, two) in enumerate(lengths)]


def test_whole_documents_fill_rows_up_to_the_budget() -> None:
    lengths, documents = [(2, 3)] * 12, [0] * 3 + [1] * 9
    for epoch in range(20):
        side = join_documents(side_of(lengths, documents), 15, seed=1, epoch=epoch, whole=True)
        # 3 segments of 3 pieces and 2 breaks are 11 pieces; a fourth makes 15
        assert side.lines.tolist() == [1, 4, 8, 12]


def test_neither_documents_nor_what_is_apart_in_the_file_are_joined() -> None:
    whole = side_of([(1, 1)] * 40, [0] * 20 + [1] * 20, gap_before=30)
    longest = 0
    for epoch in range(300):
        side = join_documents(whole, 1_000, seed=1, epoch=epoch)
        longest = max(longest, *side.source.lengths.tolist())
        assert {1, 21, 31} <= set(side.lines.tolist())
        assert all(-1 not in source for source, _ in rows_of(side))
        assert side.tasks is not None
        assert side.corpora is not None
        assert side.tasks.tolist() == side.corpora.tolist() == [int(line > 20) for line in side.lines]
    assert longest == 20 + 19


def test_a_side_without_documents_stays_as_it_is(book: Side) -> None:
    alone = replace(book, documents=None)
    assert join_documents(alone, 100, seed=1, epoch=0) is alone


TEXT = "the strands sat on the mats and the cats ran"


@pytest.fixture(params=["bpe", "unigram"])
def sampler(request: pytest.FixtureRequest, trained: dict[str, Tokenizer]) -> Sampler:
    return Sampler(trained[request.param], request.param, 0.3)


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, sampler: Sampler, trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained[request.node.callspec.params["sampler"]]


def draws(sampler: Sampler, pieces: list[int], count: int) -> list[list[int]]:
    row = np.array(pieces * count, dtype=np.int32)
    drawn = sampler.rows(Ragged(row, np.full(count, len(pieces), dtype=np.int32)), np.arange(count, dtype=np.uint64))
    return [part.tolist() for part in np.split(drawn.flat, np.cumsum(drawn.lengths)[:-1])]


def test_other_pieces_spell_the_same_text(tokenizer: Tokenizer, sampler: Sampler) -> None:
    for text in (TEXT, "今天我们去北京公园。今天天气很好", "strandsandbandsandsands" * 50):
        found = draws(sampler, tokenizer.encode(text), 50)
        assert len(set(map(tuple, found))) > 5
        assert {tokenizer.decode(each) for each in found} == {text}


def test_bytes_unknown_pieces_and_control_symbols_stay_exactly(tokenizer: Tokenizer, sampler: Sampler) -> None:
    first, second = tokenizer.encode("the mats ☃ ran"), tokenizer.encode("cats 猫 sat")
    assert tokenizer.is_byte[first].sum() == 3
    row = [EOS, *first, EOS, UNK, *second, EOS, EOS]
    found = draws(sampler, row, 60)
    assert len(set(map(tuple, found))) > 5
    for each in found:
        assert [piece for piece in each if tokenizer.is_byte[piece]] == [
            piece for piece in row if tokenizer.is_byte[piece]
        ]
        assert [piece for piece in each if piece in (EOS, UNK)] == [EOS, EOS, UNK, EOS, EOS]
        begin, middle = each.index(EOS, 1), each.index(UNK)
        assert tokenizer.decode(each[1:begin]) == "the mats ☃ ran"
        assert tokenizer.decode(each[middle + 1 : -2]) == "cats 猫 sat"


def test_bytes_that_are_no_character_and_empty_rows_stay_as_they_are(tokenizer: Tokenizer, sampler: Sampler) -> None:
    broken = tokenizer.encode("☃")[1:-1]
    assert draws(sampler, broken, 20) == [broken] * 20
    assert draws(sampler, [], 2) == [[], []]


def sources(side: Side) -> list[tuple[int, ...]]:
    return [tuple(side.source[row].tolist()) for row in range(len(side))]


def test_rows_are_drawn_anew_for_each_seed_epoch_and_copy_and_side(builtin: Prepared) -> None:
    side, rows = builtin.train, np.arange(40)

    def drawn(seed: int, epoch: int, copy: int) -> list[tuple[int, ...]]:
        cut = Resegmentation(builtin.tokenizers, "bpe", 0.2, longest=200, seed=seed)
        return sources(cut.of(side, rows, np.full(40, copy), epoch=epoch))

    once = drawn(1, 0, 0)
    assert once == drawn(1, 0, 0)
    for other in (drawn(2, 0, 0), drawn(1, 1, 0), drawn(1, 0, 1)):
        assert sum(one != another for one, another in zip(once, other, strict=True)) > 20
    same = Resegmentation(builtin.tokenizers, "bpe", 0.2, longest=200, seed=1)
    mirrored = same.of(replace(side, target=side.source), rows, np.zeros(40, dtype=np.int64), epoch=0)
    targets = [tuple(mirrored.target[row].tolist()) for row in range(40)]
    assert sum(one != another for one, another in zip(once, targets, strict=True)) > 20
    plain = [tuple(side.source[row].tolist()) for row in rows]
    assert sum(map(len, once)) > sum(map(len, plain))


def test_what_a_row_becomes_does_not_depend_on_the_rows_beside_it(builtin: Prepared) -> None:
    cut = Resegmentation(builtin.tokenizers, "bpe", 0.2, longest=200, seed=1)
    rows, none = np.arange(40), np.zeros(40, dtype=np.int64)
    together = sources(cut.of(builtin.train, rows, none, epoch=3))
    for row in (0, 17, 39):
        assert sources(cut.of(builtin.train, np.array([row]), none[:1], epoch=3)) == [together[row]]


def test_drawn_rows_keep_their_lines_and_spell_the_same(builtin: Prepared) -> None:
    side, rows = replace(builtin.train, tasks=np.arange(len(builtin.train)) % 3), np.array([9, 2, 30])
    drawn = Resegmentation(builtin.tokenizers, "bpe", 0.4, longest=200, seed=1).of(side, rows, rows * 0, epoch=0)
    assert drawn.lines.tolist() == side.lines[rows].tolist()
    assert drawn.tasks is not None
    assert drawn.tasks.tolist() == (rows % 3).tolist()
    for place, row in enumerate(rows):
        for tokenizer, new, old in (
            (builtin.tokenizers.source, drawn.source, side.source),
            (builtin.tokenizers.target, drawn.target, side.target),
        ):
            assert tokenizer.decode(new[place].tolist()) == tokenizer.decode(old[row].tolist())


def test_rows_that_would_outgrow_the_model_keep_their_pieces(builtin: Prepared) -> None:
    side, rows = builtin.train, np.arange(40)
    longest = int(max(side.source.lengths[rows].max(), side.target.lengths[rows].max())) + 1
    drawn = Resegmentation(builtin.tokenizers, "bpe", 0.9, longest=longest, seed=1).of(side, rows, rows * 0, epoch=0)
    assert max(drawn.source.lengths.max(), drawn.target.lengths.max()) < longest
    kept = [row for row in rows if drawn.target[row].tolist() == side.target[row].tolist()]
    assert kept, "at 0.9 nearly every long row outgrows the limit"
    assert len(kept) < len(rows)


def test_the_setting_of_the_other_kind_of_tokenizer_is_one_clear_error() -> None:
    assert sampling_strength(TokenizerSettings(kind="bpe"), dropout=0.1, alpha=0.0) == 0.1
    assert sampling_strength(TokenizerSettings(kind="unigram"), dropout=0.0, alpha=0.2) == 0.2
    with pytest.raises(
        RecipeError, match=r"subword_alpha = 0\.2 does not go with a bpe tokenizer; set training\.subword_dro"
    ):
        sampling_strength(TokenizerSettings(kind="bpe"), dropout=0.1, alpha=0.2)
    with pytest.raises(RecipeError, match=r"subword_dropout = 0\.1 does not go with a unigram"):
        sampling_strength(TokenizerSettings(kind="unigram"), dropout=0.1, alpha=0.0)
