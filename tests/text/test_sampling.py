from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from mtkit.text.sampling import BpeDropout, UnigramSampling, Words
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import BREAK, UNK, Tokenizer
from tests.text.exact import Cut, by_dropout, by_sentencepiece, by_unigram, goes_with, scores_of


@pytest.fixture(params=["bpe", "unigram"])
def tokenizer_of_either_kind(request: pytest.FixtureRequest, trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained[request.param]


def ragged(*rows: list[int]) -> Ragged:
    flat = np.array([piece for row in rows for piece in row], dtype=np.int32)
    return Ragged(flat, np.array([len(row) for row in rows], dtype=np.int32))


def test_words_are_stretches_that_no_piece_reaches_across(tokenizer_of_either_kind: Tokenizer) -> None:
    texts = ["the strands sat on a mat", "", "今天我们去北京公园。今天天气很好"]
    rows = ragged(*map(tokenizer_of_either_kind.encode, texts))
    words = Words(tokenizer_of_either_kind)
    found, counts = words.split(rows)
    assert b"".join(found) == rows.flat.tobytes()
    assert counts[1] == 0
    spelt = np.split(np.array([words.text(word) for word in found]), np.cumsum(counts)[:-1])
    for text, each in zip(texts, spelt, strict=True):
        assert "".join(each).replace("\u2581", " ").strip() == text
        borders = {one[-1] + other[0] for one, other in pairwise(each)}
        assert not [piece for piece in words.numbers if any(border in piece for border in borders)]
    assert not [each for each in spelt[0] if "\u2581" in each[1:]], "a space begins a word"
    assert len(spelt[2]) > 2, "a sentence without spaces is several words"


def test_marks_unknown_pieces_and_bytes_are_words_that_stay(tokenizer_of_either_kind: Tokenizer) -> None:
    snowman = tokenizer_of_either_kind.encode("cats ☃ ran")
    words = Words(tokenizer_of_either_kind)
    found, _ = words.split(ragged([BREAK, *snowman, UNK, *tokenizer_of_either_kind.encode("the")]))
    staying = [np.frombuffer(word, dtype=np.int32).tolist() for word in found if words.is_fixed(word)]
    assert staying == [[BREAK], *([piece] for piece in snowman if tokenizer_of_either_kind.is_byte[piece]), [UNK]]
    assert len(staying) == 5


WORDS = ["the", "strands", "ran", "thatcat", "北京的公园很好"]
SAMPLERS: dict[str, Callable[[Words, float], BpeDropout | UnigramSampling]] = {
    "bpe": BpeDropout,
    "unigram": UnigramSampling,
}
EXACT = {"bpe": by_dropout, "unigram": by_unigram}


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


@pytest.mark.parametrize(
    ("kind", "strength"), [*(("bpe", share) for share in (0.1, 0.5, 0.9)), *(("unigram", a) for a in (0.1, 0.5, 1.0))]
)
@pytest.mark.parametrize("word", WORDS)
def test_cuts_are_as_likely_as_they_are_exactly(
    trained: dict[str, Tokenizer], word: str, kind: str, strength: float
) -> None:
    tokenizer = trained[kind]
    exact = EXACT[kind]("\u2581" + word, scores_of(tokenizer), strength)
    assert len(exact) > 3
    drawn = SAMPLERS[kind](Words(tokenizer), strength).draw([written(tokenizer, word)] * 5_000, keys(5_000))
    assert goes_with(cuts(tokenizer, drawn), exact)


@pytest.mark.parametrize(("kind", "other"), [("bpe", 0.2), ("unigram", 0.1)])
@pytest.mark.parametrize("word", WORDS)
def test_sentencepiece_draws_from_the_same_distribution(
    trained: dict[str, Tokenizer], word: str, kind: str, other: float
) -> None:
    tokenizer = trained[kind]
    found = by_sentencepiece(tokenizer, word, 0.3)
    assert goes_with(found, EXACT[kind]("\u2581" + word, scores_of(tokenizer), 0.3))
    assert not goes_with(found, EXACT[kind]("\u2581" + word, scores_of(tokenizer), other)), "the test can fail"


@pytest.mark.parametrize(
    ("kind", "limits"),
    [("bpe", {"_REMEMBERED_WORDS": 2, "_CHARACTERS": 50}), ("unigram", {"_REMEMBERED_PLACES": 2})],
)
def test_what_becomes_of_a_word_depends_on_its_key_alone(
    trained: dict[str, Tokenizer], kind: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = trained[kind]
    words = [written(tokenizer, word) for word in [*WORDS, "a", "strandsandbandsandsandsandstrands" * 4]] * 40
    own, sampler = keys(len(words)), SAMPLERS[kind](Words(tokenizer), 0.3)
    together = cuts(tokenizer, sampler.draw(words, own))
    order: Sequence[int] = np.random.default_rng(2).permutation(len(words)).tolist()
    for name, limit in limits.items():
        monkeypatch.setattr(f"mtkit.text.sampling.{name}", limit)
    for begin in range(0, len(words), 7):
        part = order[begin : begin + 7]
        again = cuts(tokenizer, sampler.draw([words[place] for place in part], own[part]))
        assert again == [together[place] for place in part]
    assert len({cut for cut in together if "".join(cut) == "\u2581strands"}) > 3


@pytest.mark.parametrize(("kind", "strength"), [("bpe", 1e-12), ("unigram", 300.0)])
def test_hardly_any_dropout_and_a_strong_power_leave_the_pieces_of_encoding(
    trained: dict[str, Tokenizer], kind: str, strength: float
) -> None:
    words = [written(trained[kind], word) for word in WORDS]
    drawn = SAMPLERS[kind](Words(trained[kind]), strength).draw(words, keys(len(words)))
    assert drawn.flat.tobytes() == b"".join(words)


def test_no_words_are_no_pieces(tokenizer_of_either_kind: Tokenizer) -> None:
    for sampler in SAMPLERS.values():
        drawn = sampler(Words(tokenizer_of_either_kind), 0.1).draw([], keys(0))
        assert (len(drawn.flat), len(drawn.lengths)) == (0, 0)
