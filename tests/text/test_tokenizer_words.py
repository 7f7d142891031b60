"""Tokenizers of words: every word of the training text is a piece."""

from pathlib import Path

import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.tokenizer import BREAK, EOS, UNK, Tokenizer
from mtkit.text.tokenizer_training import train_tokenizer

LINES = ["jump twice and [MAX 10 2 ]", "jump <s> \u65e5\u672c and", "walk"] * 3
WORDS = {word for line in LINES for word in line.split()}


def words_tokenizer(folder: Path, **settings: object) -> Tokenizer:
    return train_tokenizer(folder / "m", LINES, TokenizerSettings.model_validate({"kind": "words", **settings}))


def text_pieces(tokenizer: Tokenizer) -> set[str]:
    pieces = (tokenizer.piece(index) for index in range(BREAK + 1, tokenizer.size) if not tokenizer.is_byte[index])
    return {piece[1:] for piece in pieces if piece.startswith("\u2581")}


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_every_word_is_a_piece_and_text_is_restored(tmp_path: Path, byte_fallback: bool) -> None:
    tokenizer = words_tokenizer(tmp_path, byte_fallback=byte_fallback)
    assert text_pieces(tokenizer) == WORDS
    assert tokenizer.size % 8 == 0
    assert tokenizer.size - 5 - len(WORDS) - 256 * byte_fallback < 8
    for line in LINES:
        pieces = tokenizer.encode(line)
        assert len(pieces) == len(line.split())
        assert min(pieces) > BREAK
        assert tokenizer.decode(pieces) == line


@pytest.mark.parametrize("extra", range(9))
def test_no_word_is_left_out_whatever_their_number(tmp_path: Path, extra: int) -> None:
    lines = [*LINES, *(f"w{number}" for number in range(extra))]
    tokenizer = train_tokenizer(tmp_path / "m", lines, TokenizerSettings(kind="words", byte_fallback=False))
    assert not any(UNK in pieces for pieces in tokenizer.encode_lines(lines))


def test_an_unknown_word_is_one_piece_or_its_bytes(tmp_path: Path) -> None:
    unknown = words_tokenizer(tmp_path, byte_fallback=False)
    assert unknown.encode("jump up and walk") == [*unknown.encode("jump"), UNK, *unknown.encode("and walk")]
    spelt = words_tokenizer(tmp_path, byte_fallback=True)
    for line in ("jump up and \u65e5", "up and up", "up", "jump up"):
        pieces = spelt.encode(line)
        assert UNK not in pieces
        assert spelt.decode(pieces) == line
        assert spelt.altered([line], [pieces]) == [False]


def test_the_most_frequent_words_fit_a_small_vocabulary(tmp_path: Path) -> None:
    tokenizer = words_tokenizer(tmp_path, byte_fallback=False, vocabulary=8)
    assert tokenizer.size == 8
    assert {"jump", "and"} <= text_pieces(tokenizer)


def test_a_vocabulary_smaller_than_the_special_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"261 special pieces, 256 of them for bytes.*choose 264 or more"):
        words_tokenizer(tmp_path, vocabulary=260)
    assert text_pieces(words_tokenizer(tmp_path, vocabulary=264)) == {"jump", "and", "10"}
    with pytest.raises(DataError, match=r"5 special pieces; choose 8"):
        words_tokenizer(tmp_path, vocabulary=7, byte_fallback=False)


def test_text_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable text"):
        train_tokenizer(tmp_path / "m", ["", " "], TokenizerSettings(kind="words"))


def test_tags_of_directions_and_specials_are_no_words(tmp_path: Path) -> None:
    settings = TokenizerSettings(kind="words", byte_fallback=False)
    tokenizer = train_tokenizer(tmp_path / "m", LINES, settings, ["de", "fr"])
    assert tokenizer.tag("en-fr") == tokenizer.tag("en-de") + 1
    assert EOS not in tokenizer.encode("</s> < /s>")
    assert text_pieces(tokenizer) == WORDS


def test_a_long_word_and_a_rare_character_are_pieces(tmp_path: Path) -> None:
    lines = ["a b c"] * 50_000 + ["x" * 7_996, "\u4e00"]
    tokenizer = train_tokenizer(tmp_path / "m", lines, TokenizerSettings(kind="words", byte_fallback=False))
    assert [len(tokenizer.encode(line)) for line in lines[-2:]] == [1, 1]
    assert UNK not in tokenizer.encode(lines[-1]) + tokenizer.encode(lines[-2])


def test_a_word_that_sentencepiece_cannot_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a word of 8,000 bytes, 'xxxxxxxxxxxxxxxxxxxx'\.\.\.; choose bpe"):
        train_tokenizer(tmp_path / "m", ["a b", "x" * 7_997], TokenizerSettings(kind="words"))
    assert list(tmp_path.iterdir()) == []
