"""Minimum Bayes risk in `translate_lines`: the choice among the same hypotheses by sacrebleu, segment by segment."""

from math import inf
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.translate import _rerank, translate_lines
from mtkit.decoding.translation import Translation
from mtkit.model.transformer import Transformer
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import Tokenizers
from tests.decoding.trained import make_run, sentences

SENTENCE = "The old dog sees a small house near the tree, and one bird."
LINES = [*sentences(8, seed=6), "", "x", SENTENCE]
SEARCHES = [{"method": "beam", "beam": 6}, {"method": "sample", "temperature": 0.3, "epsilon": 0.02}]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Tokenizers]:
    run = make_run(tmp_path_factory.mktemp("run")).run
    return run.load_model(), run.tokenizers


def translate(parts: tuple[Transformer, Tokenizers], lines: list[str], **settings: Any) -> list[list[Translation]]:
    model, tokenizers = parts
    return translate_lines(ModelEngine(model, DecodingSettings.model_validate(settings)), tokenizers, lines)


@pytest.mark.parametrize("search", SEARCHES, ids=["beam", "sample"])
@pytest.mark.parametrize("metric", ["chrf", "bleu"])
def test_the_choice_is_that_of_brute_force(
    parts: tuple[Transformer, Tokenizers], search: dict[str, Any], metric: str
) -> None:
    peer = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    samples = {} if search["method"] == "beam" else {"samples": 6}
    known = translate(parts, LINES, n_best=6, **search)
    chosen = translate(parts, LINES, mbr=metric, **samples, **search)
    changed = 0
    for line, hypotheses, (best,) in zip(LINES, known, chosen, strict=True):
        if not line:
            assert best.parts == 0
            continue
        texts = [hypothesis.text for hypothesis in hypotheses]
        means = [np.mean([peer.sentence_score(text, [other]).score for other in texts]) for text in texts]
        assert best.score == pytest.approx(max(means), abs=1e-9)
        place = int(np.argmax(np.round(means, 9)))  # the first of equal ones
        assert (best.text, best.log_prob) == (texts[place], hypotheses[place].log_prob)
        changed += place > 0
    assert changed >= 3


def test_several_translations_are_in_order_and_distinct_ones_come_first(parts: tuple[Transformer, Tokenizers]) -> None:
    found = translate(parts, LINES[:8], n_best=12, method="sample", temperature=0.2, mbr="chrf", samples=12)
    for translations in found:
        texts = [translation.text for translation in translations]
        distinct = len(set(texts))
        assert len(set(texts[:distinct])) == distinct
        scores = [translation.score for translation in translations[:distinct]]
        assert scores == sorted(scores, reverse=True)


def test_missing_hypotheses_are_last_and_compared_with_none() -> None:
    missing = Translation("", -inf, -inf, (3,))
    found = _rerank(
        [Translation("a b", -1, -1, (4,)), Translation("c d", -2, -2, (5,)), missing, missing], "bleu", None
    )
    assert [translation.text for translation in found] == ["a b", "c d", "", ""]
    assert [translation.score for translation in found] == [50, 50, -inf, -inf]
    assert _rerank([missing], "chrf", None) == [missing]


def test_parts_of_a_long_line_are_chosen_one_by_one(parts: tuple[Transformer, Tokenizers]) -> None:
    settings = {"method": "beam", "beam": 5, "mbr": "chrf"}
    (whole,), (alone,) = translate(parts, [" ".join([SENTENCE] * 3), SENTENCE], **settings)
    assert whole.parts == 3
    assert whole.score == pytest.approx(np.mean([part.score for part in whole.of_parts]))
    assert whole.text == " ".join(part.text for part in whole.of_parts)
    assert [part.text for part in whole.of_parts] == [alone.text] * 3
