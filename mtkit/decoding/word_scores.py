"""Log-probabilities of given translations' words and pieces."""

from dataclasses import dataclass

import numpy as np

from mtkit.decoding.forced import Forced
from mtkit.text.tokenizer import EOS, Tokenizer
from mtkit.text.words import word_shares, words

END = "</s>"
"""The name of the end of the translation, which is the last word and the last piece."""


@dataclass(frozen=True)
class WordScores:
    """The log-probability of a translation, of its words and of its pieces; both sum to the first, up to rounding."""

    log_prob: float
    words: list[tuple[str, float]]
    """Each word, as `mtkit.text.words.words` separates them, with the sum of its pieces; the end last."""
    pieces: list[tuple[str, float]]
    """Each piece, with U+2581 for a space; the end last."""


def score_words(tokenizer: Tokenizer, text: str, forced: Forced) -> WordScores:
    """Return the word scores of a target line, from the log-probabilities of its pieces.

    A piece that spells parts of several words is divided among them by its bytes in each. A piece that spells nothing,
    such as a space, belongs to the word that follows it, or to the last word.
    """
    *pieces, end = forced.pieces
    assert end == EOS
    *log_probs, end_log_prob = forced.log_probs
    names = words(text)
    totals = np.zeros(0)
    if names:
        shares = _complete(word_shares(tokenizer, pieces, text, normalised=True))
        totals = np.asarray(log_probs) @ shares
    of_pieces = [(tokenizer.name(piece), log_prob) for piece, log_prob in zip(pieces, log_probs, strict=True)]
    last = (END, end_log_prob)
    return WordScores(forced.log_prob, [*zip(names, totals.tolist(), strict=True), last], [*of_pieces, last])


def _complete(shares: np.ndarray) -> np.ndarray:
    """Return how much of each piece belongs to each word, (pieces, words); each row sums to 1."""
    sums = shares.sum(1, keepdims=True)
    complete = shares / np.where(sums > 0, sums, 1)
    word = shares.shape[1] - 1
    for piece in range(len(shares) - 1, -1, -1):
        if sums[piece, 0] > 0:
            word = int(shares[piece].argmax())
        else:
            complete[piece, word] = 1
    return complete
