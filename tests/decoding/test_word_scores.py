"""Scores of words and pieces of given translations."""

import numpy as np
import pytest

from mtkit.decoding.forced import Forced
from mtkit.decoding.word_scores import END, score_words
from mtkit.text.tokenizer import EOS, Tokenizer
from mtkit.text.words import words
from tests.decoding.trained import make_run

TEXTS = [
    "The old dog sees the house.",
    "  Two   birds,  one  tree ",
    "老狗在树下看见了一座小房子。",
    "これは ペン です。",
    "ผู้หญิงอ่านหนังสือ",
    "mixed 中文 words",
    "",
    "👍🏽 e\u0301",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_run(tmp_path_factory.mktemp("run")).run.tokenizers.target


def forced_of(tokenizer: Tokenizer, text: str, seed: int = 0) -> Forced:
    pieces = (*tokenizer.encode(text), EOS)
    return Forced(pieces, tuple(-np.random.default_rng(seed).random(len(pieces))))


@pytest.mark.parametrize("text", TEXTS)
def test_words_and_pieces_sum_to_the_score(tokenizer: Tokenizer, text: str) -> None:
    forced = forced_of(tokenizer, text)
    scored = score_words(tokenizer, text, forced)
    assert scored.log_prob == forced.log_prob
    for parts in (scored.words, scored.pieces):
        assert sum(log_prob for _, log_prob in parts) == pytest.approx(forced.log_prob, abs=1e-9)
        assert parts[-1] == (END, forced.log_probs[-1])
    assert [word for word, _ in scored.words[:-1]] == words(text)
    assert [piece for piece, _ in scored.pieces[:-1]] == [tokenizer.piece(piece) for piece in forced.pieces[:-1]]


def test_the_pieces_of_a_word_are_added(tokenizer: Tokenizer) -> None:
    """Each piece that begins with a space begins a word."""
    text = "The old dog sees the house."
    forced = forced_of(tokenizer, text)
    sums: list[float] = []
    for piece, log_prob in zip(forced.pieces[:-1], forced.log_probs, strict=False):
        if tokenizer.begins_word[piece]:
            sums.append(0.0)
        sums[-1] += log_prob
    found = score_words(tokenizer, text, forced).words
    assert [log_prob for _, log_prob in found[:-1]] == pytest.approx(sums)


def test_a_piece_of_several_words_is_divided_by_bytes_and_a_space_goes_to_the_next_word(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = {10: "\u2581", 11: "中文", 12: "字", 13: "\u2581a", 14: "\u2581"}
    sizes = np.zeros(tokenizer.size, dtype=np.int64)
    for piece, spelling in pieces.items():
        sizes[piece] = len(spelling.strip("\u2581").encode())
    monkeypatch.setitem(tokenizer.__dict__, "bytes", sizes)
    forced = Forced((10, 11, 12, 13, 14, EOS), (-1.0, -4.0, -8.0, -16.0, -32.0, -64.0))
    found = score_words(tokenizer, "中文字 a", forced).words
    assert found == [("中", -3.0), ("文", -2.0), ("字", -8.0), ("a", -48.0), (END, -64.0)]
