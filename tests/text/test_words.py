"""Words by number, and which pieces spell them."""

from pathlib import Path

import numpy as np
import pytest

from mtkit.recipe.data import TokenizerSettings
from mtkit.text.characters import Folding
from mtkit.text.tokenizer import BREAK, EOS, UNK, Tokenizer
from mtkit.text.tokenizer_training import train_tokenizer
from mtkit.text.words import is_unspaced, word_shares, word_starts, words


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "the cat",
        " a\tb\u2028c\u00a0d  e ",
        "naïve cafe\u0301 fine",
        "안녕 하세요",
        "\u0645\u0631\u062d\u0628\u0627 x",
    ],
)
def test_spaces_part_words(text: str) -> None:
    assert words(text) == text.split()
    assert [text[at:][: len(word)] for at, word in zip(word_starts(text), words(text), strict=True)] == words(text)


@pytest.mark.parametrize("text", ["北京", "。", "今日は", "ガッコウー", "ที่นี่", "か\u3099", "ខ្ញុំ"])
def test_text_of_scripts_without_spaces_is_recognised(text: str) -> None:
    assert is_unspaced(text)
    assert not is_unspaced(f"{text}a")
    assert not is_unspaced("")
    assert not is_unspaced("안녕")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("我爱你。", "我 爱 你 。"),
        ("iPhone13を 買う！", "iPhone13 を 買 う ！"),
        ("か\u3099っこ ｶﾞｽ", "か\u3099 っ こ ｶﾞ ｽ"),
        ("ที่ นี่", "ที่ นี่"),
        ("ＡＢＣ１２", "ＡＢＣ１２"),
        ("ខ្ញុំ\u200bទៅ", "ខ្ ញុំ\u200b ទៅ"),
        ("我\u00ad们 \u200b我\u200bdog", "我\u00ad 们 \u200b我\u200b dog"),
        ("我\U0001f469\u200d\U0001f467。", "我 \U0001f469\u200d\U0001f467 。"),
    ],
)
def test_characters_without_spaces_are_words(text: str, parts: str) -> None:
    assert words(text) == parts.split()


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "unknown"])
def tokenizer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tokenizer:
    lines = ["the cat sees a house .", "a dog likes the river", "私は猫が好きです。", "犬は家を見ます。"] * 50
    settings = TokenizerSettings(vocabulary=330 if request.param else 80, byte_fallback=request.param)
    return train_tokenizer(tmp_path_factory.mktemp("pieces") / "x.model", lines, settings)


@pytest.mark.parametrize("text", ["the cat likes  a river", "私は猫が好きです。", "the 犬 sees 家を見ます。"])
def test_every_piece_spells_the_words_that_its_text_lies_in(tokenizer: Tokenizer, text: str) -> None:
    """Against a walk over the characters: each belongs to a piece, and to a word."""
    pieces = tokenizer.encode(text)
    expected = np.zeros((len(pieces), len(words(text))))
    owners = [number for number, word in enumerate(words(text)) for _ in word]
    position = 0
    for row, piece in enumerate(pieces):
        spelt = tokenizer.piece(piece).replace("▁", "")
        size = len(spelt.encode())
        for character in spelt:
            expected[row, owners[position]] += len(character.encode()) / size
            position += 1
    assert position == len(owners)
    for normalised in (True, False):
        np.testing.assert_allclose(word_shares(tokenizer, pieces, text, normalised=normalised), expected, atol=1e-6)


def test_characters_outside_the_vocabulary_have_their_words(tokenizer: Tokenizer) -> None:
    text = "the 😀 cat 😀😀"
    pieces = tokenizer.encode(text)
    assert any(tokenizer.is_byte[pieces]) or UNK in pieces
    found = word_shares(tokenizer, pieces, text, normalised=True)
    names = [tokenizer.piece(piece) for piece in pieces]
    last_cat = max(place for place, name in enumerate(names) if name in ("▁cat", "t", "at", "cat", "a"))
    rows = found.argmax(1)
    assert rows[0] == 0
    assert rows[last_cat] == 2
    assert rows[-1] == 3
    strange = [row for row, piece in enumerate(pieces) if tokenizer.is_byte[piece] or piece == UNK]
    assert {int(rows[row]) for row in strange} == {1, 3}


def test_marks_spell_nothing(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.encode("the cat")
    with_marks = [BREAK, *pieces, EOS]
    found = word_shares(tokenizer, with_marks, "the cat", normalised=True)
    assert not found[[0, -1]].any()
    np.testing.assert_allclose(found[1:-1], word_shares(tokenizer, pieces, "the cat", normalised=True))
    assert word_shares(tokenizer, [EOS], "", normalised=False).shape == (1, 0)


def test_folded_text_keeps_its_words(tokenizer: Tokenizer) -> None:
    """Full-width letters, no-break spaces and ligatures are other bytes once they are folded."""
    folding = Tokenizer(tokenizer.processor, Folding("nfkc"))
    text = "ｔｈｅ\u00a0cat\u3000ﬁsh 犬"
    pieces = folding.encode(text)
    assert pieces == tokenizer.encode("the cat fish 犬")
    found = word_shares(folding, pieces, text, normalised=True)
    np.testing.assert_allclose(found, word_shares(tokenizer, pieces, "the cat fish 犬", normalised=True), atol=1e-6)


@pytest.mark.parametrize(
    "text",
    # \u25a0 shares two bytes with sentencepiece's mark of a space
    ["the dog", "the \u00e9t\u00e9 dog", "\u732b the", "\u00e9t\u00e9 \u732b dog", "x", "the \u25a0 dog"],
)
def test_an_unknown_word_of_a_tokenizer_of_words_spells_only_itself(tmp_path: Path, text: str) -> None:
    tokenizer = train_tokenizer(tmp_path / "m", ["the dog sees a cat"], TokenizerSettings(kind="words"))
    rows: list[list[float]] = []
    for column, word in enumerate(text.split()):
        share = [float(other == column) for other in range(len(text.split()))]
        # an unknown word: three bytes of a space, then its bytes
        rows += [share] if word in ("the", "dog") else [[0.0] * len(share)] * 3 + [share] * len(word.encode())
    shares = word_shares(tokenizer, tokenizer.encode(text), text, normalised=True)
    np.testing.assert_array_equal(shares, rows)


def test_an_unknown_piece_of_a_tokenizer_of_words_spells_its_words(tmp_path: Path) -> None:
    settings = TokenizerSettings(kind="words", byte_fallback=False)
    tokenizer = train_tokenizer(tmp_path / "m", ["the dog sees a cat"], settings)
    shares = word_shares(tokenizer, tokenizer.encode("the big red dog"), "the big red dog", normalised=True)
    np.testing.assert_array_equal(shares, [[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]])
