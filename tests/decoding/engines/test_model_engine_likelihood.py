"""The log-probability of given pieces in one pass."""

import pytest

from mtkit.decoding.engines.model_engine import forced_log_probs
from mtkit.decoding.translate import padded
from mtkit.text.tokenizer import EOS
from tests.decoding.tiny import TinyModel, log_prob_of, random_sources


def test_equals_the_sum_over_steps_whatever_the_batch() -> None:
    model = TinyModel()
    sources, targets = ([[*each, EOS] for each in random_sources(12, seed=seed)] for seed in (1, 2))
    device = model.output_weight.device
    found = forced_log_probs(model, padded(sources, device), padded(targets, device))
    for source, target, log_prob in zip(sources, targets, found.tolist(), strict=True):
        assert log_prob == pytest.approx(log_prob_of(model, source[:-1], target), abs=1e-4)
