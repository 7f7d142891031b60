"""Forced decoding: the log-probability of given pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.decoding.engines.model_engine import ModelEngine, forced_log_probs
from mtkit.decoding.forced import force_lines
from mtkit.decoding.lines.batches import padded
from mtkit.decoding.translate import translate_lines
from mtkit.errors import DataError
from mtkit.model.transformer import Transformer
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS, Tokenizers
from tests.decoding.trained import make_run, sentences, three_threads


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Tokenizers]:
    run = make_run(tmp_path_factory.mktemp("run")).run
    return run.load_model(), run.tokenizers


def log_probs(
    parts: tuple[Transformer, Tokenizers], sources: list[str], targets: list[str], batch_tokens: int
) -> list[float]:
    model, tokenizers = parts
    engine = ModelEngine(model, DecodingSettings(batch_tokens=batch_tokens))
    return [forced.log_prob for forced in force_lines(engine, tokenizers, sources, targets)]


def test_hypotheses_of_the_transformer_score_what_forcing_them_gives(parts: tuple[Transformer, Tokenizers]) -> None:
    """The steps, the reordering and the parallel pass of the real model agree."""
    model, tokenizers = parts
    lines = sentences(15, seed=3)
    for method, kept in (("beam", 4), ("greedy", 1), ("sample", 4)):
        settings = DecodingSettings.model_validate({"method": method, "beam": 4, "n_best": kept})
        found = translate_lines(ModelEngine(model, settings), tokenizers, lines)
        sources = [[*tokenizers.source.encode(line), EOS] for line in lines for _ in range(kept)]
        flat = [each for translations in found for each in translations]
        device = model.output_weight.device
        forced = forced_log_probs(model, padded(sources, device), padded([each.pieces for each in flat], device)).sum(1)
        for each, log_prob in zip(flat, forced.tolist(), strict=True):
            assert each.log_prob == pytest.approx(log_prob, abs=1e-4)


def test_lines_in_order_whatever_the_batch(parts: tuple[Transformer, Tokenizers]) -> None:
    sources, targets = sentences(20, 1), sentences(20, 2)
    one, many = (log_probs(parts, sources, targets, batch_tokens=size) for size in (1, 10_000))
    assert one == pytest.approx(many, abs=1e-4)
    with three_threads():
        assert log_probs(parts, sources, targets, batch_tokens=30) == pytest.approx(many, abs=1e-4)
    assert len(set(many)) == 20
    assert log_probs(parts, sources[4:5], targets[4:5], batch_tokens=100)[0] == pytest.approx(many[4], abs=1e-4)
    assert log_probs(parts, ["", "a"], ["", ""], batch_tokens=100)[0] < 0


def test_what_cannot_be_forced_is_named(parts: tuple[Transformer, Tokenizers], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 source lines and 1 target"):
        log_probs(parts, ["a", "b"], ["a"], batch_tokens=100)
    with pytest.raises(DataError, match="target line 2 has"):
        log_probs(parts, ["a", "b"], ["a", "b" * 100], batch_tokens=100)


def test_pairs_that_memory_does_not_hold_together_are_scored_in_halves(
    parts: tuple[Transformer, Tokenizers], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, targets = sentences(9, 1), sentences(9, 2)
    whole = log_probs(parts, sources, targets, batch_tokens=10_000)
    forward, sizes = Transformer.forward, list[int]()

    def short(self: Transformer, source: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(source))
        if len(source) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, source, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", short)
    assert log_probs(parts, sources, targets, batch_tokens=10_000) == pytest.approx(whole, abs=1e-4)
    assert max(sizes) == 9


def test_pairs_as_long_as_the_model_takes_are_forced(parts: tuple[Transformer, Tokenizers]) -> None:
    model, tokenizers = parts
    texts = [" ".join(["a"] * words) for words in range(model.longest_source)]
    pieces = {len(tokenizers.source.encode(text)) + 1: text for text in texts}
    assert log_probs(parts, [pieces[model.longest_source]], ["a"], batch_tokens=1000)[0] < 0
    with pytest.raises(DataError, match=f"source line 1 has {model.longest_source + 1:,} pieces, its end included"):
        log_probs(parts, [pieces[model.longest_source] + " a"], ["a"], batch_tokens=1000)
