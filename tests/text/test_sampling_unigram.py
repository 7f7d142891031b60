import numpy as np
import pytest

from mtkit.text.sampling import UnigramSampling, Words
from mtkit.text.tokenizer import Tokenizer
from tests.text.exact import by_sentencepiece, by_unigram, goes_with, scores_of
from tests.text.test_sampling import cuts, keys, written

WORDS = ["the", "strands", "ran", "thatcat", "北京的公园很好"]


@pytest.fixture
def tokenizer(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["unigram"]


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("word", WORDS)
def test_cuts_are_as_likely_as_they_are_exactly(tokenizer: Tokenizer, word: str, alpha: float) -> None:
    exact = by_unigram("\u2581" + word, scores_of(tokenizer), alpha)
    assert len(exact) > 3
    drawn = UnigramSampling(Words(tokenizer), alpha).draw([written(tokenizer, word)] * 5_000, keys(5_000))
    assert goes_with(cuts(tokenizer, drawn), exact)


@pytest.mark.parametrize("word", WORDS)
def test_sentencepiece_draws_from_the_same_distribution(tokenizer: Tokenizer, word: str) -> None:
    exact = by_unigram("\u2581" + word, scores_of(tokenizer), 0.3)
    found = by_sentencepiece(tokenizer, word, 0.3)
    assert goes_with(found, exact)
    assert not goes_with(found, by_unigram("\u2581" + word, scores_of(tokenizer), 0.1)), "the test can fail"


def test_what_becomes_of_a_word_depends_on_its_key_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [written(tokenizer, word) for word in [*WORDS, "a", "strandsandbandsandsandsandstrands" * 4]] * 40
    own, sampler = keys(len(words)), UnigramSampling(Words(tokenizer), 0.3)
    together = cuts(tokenizer, sampler.draw(words, own))
    order = np.random.default_rng(2).permutation(len(words)).tolist()
    monkeypatch.setattr("mtkit.text.sampling._REMEMBERED_PLACES", 2)
    for begin in range(0, len(words), 7):
        part = order[begin : begin + 7]
        again = cuts(tokenizer, sampler.draw([words[place] for place in part], own[part]))
        assert again == [together[place] for place in part]
    assert len({cut for cut in together if "".join(cut) == "\u2581strands"}) > 3


def test_a_strong_power_takes_the_likeliest_cut(tokenizer: Tokenizer) -> None:
    words = [written(tokenizer, word) for word in WORDS]
    drawn = UnigramSampling(Words(tokenizer), 300.0).draw(words, keys(len(words)))
    assert drawn.flat.tobytes() == b"".join(words)


def test_no_words_are_no_pieces(tokenizer: Tokenizer) -> None:
    drawn = UnigramSampling(Words(tokenizer), 0.1).draw([], keys(0))
    assert (len(drawn.flat), len(drawn.lengths)) == (0, 0)
