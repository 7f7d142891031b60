"""Minimum Bayes risk decoding: the hypothesis that is most similar to all others, by sentence chrF or BLEU.

The expected utility of a hypothesis is its mean score with every hypothesis of the segment as its reference, itself and
repeated ones included (Kumar and Byrne, HLT-NAACL 2004; Eikema and Aziz, COLING 2020). The scores are sacrebleu's for
sentences: chrF, and BLEU with the effective order.

The n-grams of a hypothesis are counted once. An n-gram that occurs c times is c numbered elements of a set, so that the
matches of two texts, the sum of the smaller counts, are the size of an intersection, and the matches of all pairs are
the product of a matrix of zeros and ones with its transpose.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mtkit.text.languages import installed_tokenizer

Metric = Literal["chrf", "bleu"]
Numbers = NDArray[np.float64]

CHARACTERS, WORDS = 6, 4
"""Maximum n-gram order in chrF and in BLEU."""

BETA = 2.0
"""Weight of recall in chrF."""

DIGITS = 8
"""Decimals in which utilities are compared, so that rounding errors do not order equal ones."""

COLUMNS = 1 << 14
"""Elements of the sets that are compared at a time, to bound the memory."""


def rank(texts: Sequence[str], metric: Metric, language: str | None = None) -> list[tuple[int, float]]:
    """Return the index and the expected utility of each hypothesis of a segment, the highest utility first.

    Repeated texts follow the distinct ones. Of equal utilities, the first hypothesis comes first.
    """
    utilities = expected_utilities(texts, metric, language)
    first = {text: place for place, text in reversed([*enumerate(texts)])}
    order = sorted(
        range(len(texts)), key=lambda place: (place != first[texts[place]], -round(utilities[place], DIGITS))
    )
    return [(place, utilities[place]) for place in order]


def expected_utilities(texts: Sequence[str], metric: Metric, language: str | None = None) -> list[float]:
    """Return the mean score of each text with all texts as its references. `language` selects BLEU's tokenizer."""
    if not texts:
        return []
    counts = Counter(texts)
    distinct = list(counts)
    weights = np.array([counts[text] for text in distinct]) / len(texts)
    means = dict(zip(distinct, (pairwise_scores(distinct, metric, language) @ weights).tolist(), strict=True))
    return [means[text] for text in texts]


def pairwise_scores(texts: Sequence[str], metric: Metric, language: str | None = None) -> Numbers:
    """Return the score of each text (N, N), rows, with each text as its reference, columns, from 0 to 100."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams, extract_word_ngrams

    if metric == "chrf":
        by_text: list[list[Counter[Any]]] = [extract_all_char_ngrams(text, CHARACTERS) for text in texts]
        return _chrf([_matches(ngrams) for ngrams in zip(*by_text, strict=True)])
    tokens = [_tokenizer(installed_tokenizer(language))(text.rstrip()).split() for text in texts]
    return _bleu([_matches([extract_word_ngrams(line, order) for line in tokens]) for order in range(1, WORDS + 1)])


@cache
def _tokenizer(name: str) -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize=name).tokenizer


def _matches(ngrams: Sequence[Counter[Any]]) -> tuple[Numbers, Numbers]:
    """Return the matching n-grams of all pairs (N, N), and the n-grams of each text (N,)."""
    numbers: dict[tuple[Any, int], int] = {}
    rows, columns = list[int](), list[int]()
    for row, counts in enumerate(ngrams):
        for ngram, count in counts.items():
            for repeat in range(count):
                rows.append(row)
                columns.append(numbers.setdefault((ngram, repeat), len(numbers)))
    row_of, column_of = np.array(rows, dtype=np.intp), np.array(columns, dtype=np.intp)
    matches = np.zeros((len(ngrams), len(ngrams)))
    for begin in range(0, len(numbers), COLUMNS):
        members = np.zeros((len(ngrams), min(COLUMNS, len(numbers) - begin)), dtype=np.float32)
        within = (column_of >= begin) & (column_of < begin + COLUMNS)
        members[row_of[within], column_of[within] - begin] = 1
        matches += members @ members.T
    return matches, np.bincount(row_of, minlength=len(ngrams)).astype(np.float64)


def _chrf(by_order: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """Return chrF of all pairs: the F-score of mean precision and mean recall over the orders that both texts have.

    Popović (WMT 2015), with sacrebleu's effective order.
    """
    precision, recall, orders = (np.zeros_like(by_order[0][0]) for _ in range(3))
    for matches, totals in by_order:
        hypothesis, reference = np.maximum(totals[:, None], 1), np.maximum(totals[None, :], 1)
        precision += matches / hypothesis  # 0 if one of the texts has no n-grams
        recall += matches / reference
        orders += (totals[:, None] > 0) & (totals[None, :] > 0)
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    # the least number keeps 0 / 0 from occurring and changes nothing else
    return 100 * (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, np.finfo(float).tiny)


def _bleu(by_order: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """Return sentence BLEU of all pairs: effective order, and exponential smoothing (Chen and Cherry, WMT 2014)."""
    lengths = by_order[0][1]
    hypothesis, reference = np.maximum(lengths[:, None], 1), lengths[None, :]
    penalty = np.exp(np.minimum(1 - reference / hypothesis, 0))
    logarithms, orders, smoothing = np.zeros_like(penalty), np.zeros_like(penalty), np.ones_like(penalty)
    for matches, totals in by_order:
        total = np.broadcast_to(totals[:, None], matches.shape)
        has_order = total > 0
        smoothing *= np.where(has_order & (matches == 0), 2, 1)
        precision = np.where(matches > 0, matches, 1 / smoothing) / np.maximum(total, 1)
        logarithms += np.where(has_order, np.log(precision), 0)
        orders += has_order
    has_matches = sum(matches for matches, _ in by_order) > 0
    return np.where(has_matches, 100 * penalty * np.exp(logarithms / np.maximum(orders, 1)), 0.0)
