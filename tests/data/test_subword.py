import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtkit.data.prepared import Prepared, Side
from mtkit.data.subword import Resegmentation, Sampler, strength_of
from mtkit.data.tokenizer import EOS, UNK, Tokenizer, train_tokenizer
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings

LINES = ["the cats sat on the mats", "the rats ran", "that cat ran at a rat", "strands and bands and sands"] * 30
TEXT = "the strands sat on the mats and the cats ran"


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = TokenizerSettings(kind=request.param, vocabulary=320)
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "joint.model", LINES, settings)


def draws(sampler: Sampler, pieces: list[int], count: int) -> list[tuple[int, ...]]:
    return [tuple(sampler.draw(np.array(pieces, dtype=np.int32), seed)) for seed in range(count)]


def test_other_pieces_spell_the_same_text(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.encode(TEXT)
    found = draws(Sampler(tokenizer, 0.3), pieces, 50)
    assert len(set(found)) > 15
    assert {tokenizer.decode(each) for each in found} == {TEXT}


def test_a_draw_is_a_function_of_its_seed_in_any_thread(tokenizer: Tokenizer) -> None:
    pieces, results = tokenizer.encode(TEXT), []

    def work() -> None:
        results.append(draws(Sampler(tokenizer, 0.3), pieces, 40))

    work()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == results[0] for each in results)
    # whatever was drawn before
    sampler = Sampler(tokenizer, 0.3)
    assert draws(sampler, pieces, 40)[::-1] == [
        tuple(sampler.draw(np.array(pieces), seed)) for seed in reversed(range(40))
    ]


def test_a_merge_is_left_out_with_the_probability_asked_for(tmp_path: Path) -> None:
    """A word of two characters comes whole by two merges; by two others where the first of them was left out."""
    lines = ["ab cd ef gh ij kl mn op qr st uv wx yz"] * 50
    tokenizer = train_tokenizer(tmp_path / "joint.model", lines, TokenizerSettings(vocabulary=352))
    pieces = tokenizer.encode("ab ab ab ab ab ab ab ab ab ab")
    assert [tokenizer.piece(piece) for piece in pieces] == ["\u2581ab"] * 10
    ways = sum(tokenizer.processor.piece_to_id(first) != UNK for first in ("\u2581a", "ab"))
    for dropout in (0.0, 0.1, 0.6):
        found = draws(Sampler(tokenizer, dropout), pieces, 400)
        whole = sum(each.count(pieces[0]) for each in found) / 4_000
        wanted = (1 - dropout) ** 2 * (1 + dropout if ways == 2 else 1)
        assert whole == pytest.approx(wanted, abs=0.03)


def test_without_dropout_the_pieces_are_those_of_encoding(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "joint.model", LINES, TokenizerSettings(vocabulary=320))
    for line in LINES[:4]:
        pieces = tokenizer.encode(line)
        assert draws(Sampler(tokenizer, 0.0), pieces, 3) == [tuple(pieces)] * 3


def test_bytes_unknown_pieces_and_control_symbols_stay_exactly(tokenizer: Tokenizer) -> None:
    sampler = Sampler(tokenizer, 0.3)
    first, second = tokenizer.encode("the mats ☃ ran"), tokenizer.encode("cats 猫 sat")
    assert tokenizer.is_byte[first].sum() == 3
    row = [EOS, *first, EOS, UNK, *second, EOS, EOS]
    found = draws(sampler, row, 60)
    assert len(set(found)) > 5
    for each in found:
        assert [piece for piece in each if tokenizer.is_byte[piece]] == [
            piece for piece in row if tokenizer.is_byte[piece]
        ]
        assert [piece for piece in each if piece in (EOS, UNK)] == [EOS, EOS, UNK, EOS, EOS]
        begin, middle = each.index(EOS, 1), each.index(UNK)
        assert tokenizer.decode(each[1:begin]) == "the mats ☃ ran"
        assert tokenizer.decode(each[middle + 1 : -2]) == "cats 猫 sat"


def test_bytes_that_are_no_character_and_empty_rows_stay_as_they_are(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("☃")[:-1]
    assert set(draws(Sampler(tokenizer, 0.5), broken, 20)) == {tuple(broken)}
    assert draws(Sampler(tokenizer, 0.5), [], 2) == [(), ()]


def sources(side: Side) -> list[tuple[int, ...]]:
    return [tuple(side.source[row].tolist()) for row in range(len(side))]


def test_rows_are_drawn_anew_for_each_seed_epoch_and_part(builtin: Prepared) -> None:
    side, rows = builtin.train, np.array([7, 7, *range(40)])

    def drawn(seed: int, epoch: int, part: int) -> list[tuple[int, ...]]:
        cut = Resegmentation(builtin.tokenizers, 0.2, longest=200, seed=seed)
        return sources(cut.of(side, rows, epoch=epoch, part=part))

    once = drawn(1, 0, 3)
    assert once == drawn(1, 0, 3)
    for other in (drawn(2, 0, 3), drawn(1, 1, 3), drawn(1, 0, 4)):
        assert sum(one != another for one, another in zip(once, other, strict=True)) > 20
    again = [drawn(1, epoch, 0) for epoch in range(20)]
    assert any(rows[0] != rows[1] for rows in again), "a row that comes twice is drawn twice"
    plain = [tuple(side.source[row].tolist()) for row in rows]
    assert sum(map(len, once)) > sum(map(len, plain))


def test_drawn_rows_keep_their_lines_and_spell_the_same(builtin: Prepared) -> None:
    side, rows = replace(builtin.train, tasks=np.arange(len(builtin.train)) % 3), np.array([9, 2, 30])
    drawn = Resegmentation(builtin.tokenizers, 0.4, longest=200, seed=1).of(side, rows, epoch=0, part=0)
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
    drawn = Resegmentation(builtin.tokenizers, 0.9, longest=longest, seed=1).of(side, rows, epoch=0, part=0)
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
