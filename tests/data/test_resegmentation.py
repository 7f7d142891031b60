from dataclasses import replace

import numpy as np
import pytest

from mtkit.data.prepared import Prepared, Side
from mtkit.data.resegmentation import Resegmentation, Sampler, strength_of
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import EOS, UNK, Tokenizer

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
    assert strength_of(TokenizerSettings(kind="bpe"), dropout=0.1, alpha=0.0) == 0.1
    assert strength_of(TokenizerSettings(kind="unigram"), dropout=0.0, alpha=0.2) == 0.2
    with pytest.raises(
        RecipeError, match=r"subword_alpha = 0\.2 does not go with a bpe tokenizer; set training\.subword_dro"
    ):
        strength_of(TokenizerSettings(kind="bpe"), dropout=0.1, alpha=0.2)
    with pytest.raises(RecipeError, match=r"subword_dropout = 0\.1 does not go with a unigram"):
        strength_of(TokenizerSettings(kind="unigram"), dropout=0.1, alpha=0.0)
