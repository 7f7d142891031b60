"""The metrics by name, and exact match."""

from urllib.error import URLError

import pytest

from mtkit.errors import MtkitError
from mtkit.evaluation import metrics
from mtkit.evaluation.metrics import ExactMatch, make_metric, metric_names
from mtkit.evaluation.scores import score_corpus


def test_names_are_found_whatever_their_case_and_taken_once() -> None:
    assert metric_names(["bleu", "CHRF", "Ter", "exact", "BLEU"]) == ("BLEU", "chrF", "TER", "exact")
    with pytest.raises(MtkitError, match="did you mean 'bleu'"):
        make_metric("blue")


def test_exact_match_is_the_share_of_segments_that_equal_a_reference() -> None:
    hypotheses = ["I_WALK I_RUN", "I_WALK  I_RUN", "i_walk ", "", "I_JUMP"]
    references = [["I_WALK I_RUN", "I_WALK I_RUN", "I_WALK", "", "I_LOOK"], ["", "", "", "", "I_JUMP "]]
    (one,) = score_corpus(hypotheses, references[:1], metrics=["exact"])
    assert one.value == 40  # the first and the empty one; spaces within a line count
    assert one.signature.startswith("nrefs:1|case:mixed|version:")  # nothing is drawn for its interval
    assert score_corpus(hypotheses, references, metrics=["exact"])[0].value == 60
    (folded,) = score_corpus(hypotheses, references, metrics=["exact"], lowercase=True)
    assert folded.value == 80
    assert "case:lc" in folded.signature


@pytest.mark.parametrize(("hypothesis", "equal"), [("a b \t", True), (" a b", False), ("\u3000a b", False)])
def test_spaces_count_in_exact_match_except_at_the_end_of_a_line(hypothesis: str, equal: bool) -> None:
    assert score_corpus([hypothesis], [["a b"]], metrics="exact", bootstrap=0)[0].value == 100 * equal
    assert ExactMatch().corpus_score(["a b"], [[hypothesis]]).score == 100 * equal


@pytest.mark.parametrize(
    ("matches", "segments", "low", "high"),
    [(199, 200, 97.2226, 99.9117), (200, 200, 98.1155, 100), (0, 10, 0, 27.7533), (1, 1, 20.6549, 100)],
)
def test_exact_match_has_wilsons_interval(matches: int, segments: int, low: float, high: float) -> None:
    hypotheses = ["yes"] * matches + ["no"] * (segments - matches)
    (exact,) = score_corpus(hypotheses, [["yes"] * segments], metrics="exact")
    assert (exact.low, exact.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert (score_corpus(hypotheses, [["yes"] * segments], metrics="exact", bootstrap=0)[0].low) is None


def test_exact_match_is_a_sacrebleu_metric() -> None:
    metric = ExactMatch()
    assert metric.corpus_score(["a", "b", "c", "d"], [["a", "x", "c", "y"]]).score == 50
    assert "exact = 50" in str(metric.corpus_score(["a", "b"], [["a", "x"]], n_bootstrap=10))


def test_a_tokenizer_that_cannot_be_downloaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*given: object, **options: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(metrics, "BLEU", type("Offline", (), {"TOKENIZERS": ["flores200"], "__new__": offline}))
    with pytest.raises(MtkitError, match=r"cannot use the tokenizer 'flores200' here: .*no network"):
        make_metric("BLEU", tokenize="flores200")
