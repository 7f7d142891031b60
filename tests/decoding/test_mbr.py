"""Minimum Bayes risk decoding: brute force with sacrebleu's sentence scores."""

import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from mtkit.decoding import mbr
from mtkit.decoding.mbr import Metric, expected_utilities, pairwise_scores, rank

WORDS = ["the", "old", "dog,", "sees", "a", "house!", "3.5", "%", "Ärger", "x"]
EDGES = [
    "",
    " ",
    "a",
    "ab",
    "ab ab ab ab",
    "a a a a a a",
    "\u3000",
    "老狗看见小房子。",
    "老猫看见大房子。",
    "a b c d e",
]


def random_texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(0, 14))) for _ in range(count)]


def peer(metric: Metric, tokenize: str = "13a") -> BLEU | CHRF:
    return CHRF() if metric == "chrf" else BLEU(tokenize=tokenize, effective_order=True)


@pytest.mark.parametrize("metric", ["chrf", "bleu"])
@pytest.mark.parametrize("columns", [mbr.COLUMNS, 7])
def test_scores_of_pairs_are_sacrebleus(metric: Metric, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mbr, "COLUMNS", columns)
    texts, theirs = [*EDGES, *random_texts(30, seed=1)], peer(metric)
    expected = [[theirs.sentence_score(text, [reference]).score for reference in texts] for text in texts]
    np.testing.assert_allclose(pairwise_scores(texts, metric), expected, atol=1e-9)
    assert np.ptp(expected) > 90


@pytest.mark.parametrize(("language", "tokenize"), [("zh", "zh"), ("de", "13a"), ("th", "char"), (None, "13a")])
def test_the_language_selects_the_tokenizer_of_bleu(language: str | None, tokenize: str) -> None:
    theirs = peer("bleu", tokenize)
    expected = [[theirs.sentence_score(text, [reference]).score for reference in EDGES] for text in EDGES]
    np.testing.assert_allclose(pairwise_scores(EDGES, "bleu", language), expected, atol=1e-9)


@pytest.mark.parametrize("metric", ["chrf", "bleu"])
def test_the_utility_is_the_mean_over_all_repeats_included(metric: Metric) -> None:
    texts, theirs = random.Random(2).choices(random_texts(8, seed=2), k=20), peer(metric)
    expected = [np.mean([theirs.sentence_score(text, [other]).score for other in texts]) for text in texts]
    np.testing.assert_allclose(expected_utilities(texts, metric), expected, atol=1e-9)
    assert expected_utilities([], metric) == []


def test_the_text_that_is_like_most_others_comes_first() -> None:
    rare, common, near = "an old house stands here", "the dog sees the house", "the dog saw the house"
    texts = [rare, common, near, common]
    ranked = rank(texts, "chrf")
    assert [place for place, _ in ranked] == [1, 2, 0, 3]  # a repeated text is not a choice
    assert [utility for _, utility in ranked] == [expected_utilities(texts, "chrf")[place] for place, _ in ranked]


def test_of_equal_utilities_the_first_comes_first() -> None:
    assert rank(["a b", "c d"], "bleu") == [(0, 50), (1, 50)]
    assert rank([], "chrf") == []
