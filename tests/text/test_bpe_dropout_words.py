from itertools import pairwise

import numpy as np
import pytest

from mtkit.text.bpe_dropout import Words
from mtkit.text.segments import Ragged
from mtkit.text.tokenizer import BREAK, UNK, Tokenizer


@pytest.fixture(params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained[request.param]


def ragged(*rows: list[int]) -> Ragged:
    flat = np.array([piece for row in rows for piece in row], dtype=np.int32)
    return Ragged(flat, np.array([len(row) for row in rows], dtype=np.int32))


def test_words_are_stretches_that_no_piece_reaches_across(tokenizer: Tokenizer) -> None:
    texts = ["the strands sat on a mat", "", "今天我们去北京公园。今天天气很好"]
    rows = ragged(*map(tokenizer.encode, texts))
    words = Words(tokenizer)
    found, counts = words.of(rows)
    assert b"".join(found) == rows.flat.tobytes()
    assert counts[1] == 0
    spelt = np.split(np.array([words.spelt(word) for word in found]), np.cumsum(counts)[:-1])
    for text, each in zip(texts, spelt, strict=True):
        assert "".join(each).replace("\u2581", " ").strip() == text
        borders = {one[-1] + other[0] for one, other in pairwise(each)}
        assert not [piece for piece in words.numbers if any(border in piece for border in borders)]
    assert not [each for each in spelt[0] if "\u2581" in each[1:]], "a space begins a word"
    assert len(spelt[2]) > 2, "a sentence without spaces is several words"


def test_marks_unknown_pieces_and_bytes_are_words_that_stay(tokenizer: Tokenizer) -> None:
    snowman = tokenizer.encode("cats ☃ ran")
    words = Words(tokenizer)
    found, _ = words.of(ragged([BREAK, *snowman, UNK, *tokenizer.encode("the")]))
    staying = [np.frombuffer(word, dtype=np.int32).tolist() for word in found if words.stays(word)]
    assert staying == [[BREAK], *([piece] for piece in snowman if tokenizer.is_byte[piece]), [UNK]]
    assert len(staying) == 5
