"""Token match: the share of positions with the right word."""

import random
from itertools import zip_longest

import pytest

import mtkit
from mtkit.evaluation.metrics import TokenMatch, metric_names
from mtkit.evaluation.scores import score_corpus


def token(hypotheses: list[str], *references: list[str], lowercase: bool = False) -> float:
    return score_corpus(hypotheses, references, metrics="token", bootstrap=0, lowercase=lowercase)[0].value


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("a b c d", "a b c d", 100),
        ("a b x d", "a b c d", 75),
        ("a b", "a b c d", 50),  # missing words are wrong
        ("a b c d e f g h", "a b c d", 50),  # and superfluous ones
        ("x a b c", "a b c d", 0),  # by position, not by content
        ("", "a b", 0),
        ("a", "", 0),
        ("", "", 100),
        (" a   b ", "a b", 100),  # spaces do not count
        ("A b", "a b", 50),
    ],
)
def test_token_match_of_one_segment(hypothesis: str, reference: str, expected: float) -> None:
    assert token([hypothesis], [reference]) == expected


def test_the_corpus_score_is_the_share_of_all_positions() -> None:
    assert token(["a b", "x x x x x x"], ["a b", "a b c d e f"]) == 100 * 2 / 8
    generator = random.Random(1)
    texts = [[" ".join(generator.choices("abc", k=generator.randrange(9))) for _ in range(200)] for _ in range(2)]
    right = positions = 0
    for pair in zip(*texts, strict=True):
        for one, other in zip_longest(*(text.split() for text in pair)):
            right, positions = right + (one == other), positions + 1
    assert token(*texts) == pytest.approx(100 * right / positions)


def test_case_and_several_references() -> None:
    assert token(["A b"], ["a b"], lowercase=True) == 100
    assert token(["a b c"], ["a x"], ["a b d e"]) == 50  # 1 of 3, 2 of 4
    assert token(["a", "b"], ["a", "x"], ["y", "b"]) == 100
    assert token(["", "a"], ["a b", "a"], ["", "b"]) == 100  # an empty reference equals an empty hypothesis


def test_characters_are_the_words_of_chinese() -> None:
    assert token(["\u4f60\u597d\u3002"], ["\u4f60\u4eec\u3002"]) == pytest.approx(100 * 2 / 3)


def test_it_has_bootstrap_intervals_and_a_signature() -> None:
    hypotheses, references = ["a b", "a x", "x x", "a b"] * 10, ["a b"] * 40
    (score,) = score_corpus(hypotheses, [references], metrics=["token"], bootstrap=200)
    assert score.value == 62.5
    assert score.low is not None
    assert score.high is not None
    assert 40 < score.low < 62.5 < score.high < 85
    assert score.signature.startswith("nrefs:1|bs:200|seed:12345|case:mixed|version:")


def test_it_is_a_metric_by_name_and_for_sacrebleu() -> None:
    assert metric_names(["TOKEN", "exact"]) == ("token", "exact")
    assert TokenMatch().corpus_score(["a b", "c"], [["a x", "c"]]).score == pytest.approx(100 * 2 / 3)
    assert mtkit.score(["a b"], ["a c"], metrics=["token"], bootstrap=0)[0].value == 50
