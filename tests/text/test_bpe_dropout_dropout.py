from collections.abc import Sequence

import numpy as np
import pytest

from mtkit.text.bpe_dropout import BpeDropout, Words
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import Tokenizer
from tests.text.exact import Cut, by_dropout, by_sentencepiece, goes_with, scores_of

WORDS = ["the", "strands", "ran", "thatcat", "北京的公园很好"]


@pytest.fixture
def tokenizer(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["bpe"]


def written(tokenizer: Tokenizer, text: str) -> bytes:
    return np.array(tokenizer.encode(text), dtype=np.int32).tobytes()


def cuts(tokenizer: Tokenizer, drawn: Ragged) -> list[Cut]:
    ends = np.cumsum(drawn.lengths)
    return [
        tuple(tokenizer.piece(piece) for piece in drawn.flat[end - length : end].tolist())
        for end, length in zip(ends, drawn.lengths, strict=True)
    ]


def keys(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1 << 63, size=count).astype(np.uint64)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("word", WORDS)
def test_cuts_are_as_likely_as_they_are_exactly(tokenizer: Tokenizer, word: str, dropout: float) -> None:
    exact = by_dropout("\u2581" + word, scores_of(tokenizer), dropout)
    assert len(exact) > 3
    drawn = BpeDropout(Words(tokenizer), dropout).draw([written(tokenizer, word)] * 5_000, keys(5_000))
    assert goes_with(cuts(tokenizer, drawn), exact)


@pytest.mark.parametrize("word", WORDS)
def test_sentencepiece_draws_from_the_same_distribution(tokenizer: Tokenizer, word: str) -> None:
    exact = by_dropout("\u2581" + word, scores_of(tokenizer), 0.3)
    found = by_sentencepiece(tokenizer, word, 0.3)
    assert goes_with(found, exact)
    assert not goes_with(found, by_dropout("\u2581" + word, scores_of(tokenizer), 0.2)), "the test can fail"


def test_what_becomes_of_a_word_depends_on_its_key_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [written(tokenizer, word) for word in [*WORDS, "a", "strandsandbandsandsandsandstrands" * 4]] * 40
    own, sampler = keys(len(words)), BpeDropout(Words(tokenizer), 0.3)
    together = cuts(tokenizer, sampler.draw(words, own))
    order: Sequence[int] = np.random.default_rng(2).permutation(len(words)).tolist()
    monkeypatch.setattr("mtkit.text.bpe_dropout._REMEMBERED", 2)
    monkeypatch.setattr("mtkit.text.bpe_dropout._CHARACTERS", 50)
    for begin in range(0, len(words), 7):
        part = order[begin : begin + 7]
        again = cuts(tokenizer, sampler.draw([words[place] for place in part], own[part]))
        assert again == [together[place] for place in part]
    assert len({cut for cut in together if "".join(cut) == "\u2581strands"}) > 3


def test_hardly_any_dropout_leaves_the_pieces_of_encoding(tokenizer: Tokenizer) -> None:
    words = [written(tokenizer, word) for word in WORDS]
    drawn = BpeDropout(Words(tokenizer), 1e-12).draw(words, keys(len(words)))
    assert drawn.flat.tobytes() == b"".join(words)


def test_no_words_are_no_pieces(tokenizer: Tokenizer) -> None:
    drawn = BpeDropout(Words(tokenizer), 0.1).draw([], keys(0))
    assert (len(drawn.flat), len(drawn.lengths)) == (0, 0)
