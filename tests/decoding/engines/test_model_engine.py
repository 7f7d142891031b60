"""mtkit's own engine: identity, ensembles, likelihoods and number types."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtkit.attention.registry import mechanisms
from mtkit.decoding.engines.model_engine import (
    Ensemble,
    ModelEngine,
    decoding_with,
    find_dtype,
    forced_log_probs,
    mean_of,
)
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.batches import padded
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.recipe import DecodingSettings, make_recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS
from tests.decoding.tiny import TinyModel, batch_of, log_prob_of, random_sources
from tests.decoding.trained import make_run, sentences, three_threads


def test_what_decides_its_hypotheses_is_its_identity() -> None:
    engine = ModelEngine(TinyModel(), DecodingSettings())
    assert replace(engine, settings=DecodingSettings(batch_tokens=50)).identity == engine.identity
    assert replace(engine, dtype=torch.float32).identity == engine.identity
    assert replace(engine, settings=DecodingSettings(beam=2)).identity != engine.identity
    assert replace(engine, dtype=torch.bfloat16).identity != engine.identity


def test_machines_with_other_cores_make_parts_of_one_translation() -> None:
    """With a shortlist, what else is in a batch decides which pieces may come; each result is one of these settings."""
    lexicon = Lexicon(torch.zeros(8, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    engine = ModelEngine(TinyModel(), DecodingSettings(), lexicon=lexicon)
    assert engine.identity != replace(engine, lexicon=None).identity
    with three_threads():
        assert replace(engine, settings=DecodingSettings(batch_tokens=50)).identity == engine.identity


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Runs on the same data with other weights and other attentions, one of them recurrent."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder).run,
        make_run(folder, name="two", seed=2, attention="linear").run,
        make_run(folder, name="three", seed=3, attention="additive", architecture="rnn").run,
    ]


def ensemble_log_prob(models: list[TinyModel], source: list[int], pieces: list[int]) -> float:
    """The log of the mean probability, summed over the pieces, each from a fresh pass, in float64."""
    total = 0.0
    for length in range(1, len(pieces) + 1):
        probability = 0.0
        for model in models:
            target_in = torch.tensor([[2, *pieces[: length - 1]]])
            batch = batch_of([source], 1)
            hidden = model.forward(batch.source, target_in, source_valid=batch.valid).hidden[0, -1]
            probability += (hidden @ model.output_weight.T).double().softmax(-1)[pieces[length - 1]].item()
        total += torch.tensor(probability / len(models)).log().item()
    return total


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_of_a_model_with_itself_translates_as_the_model(runs: list[Run], method: str) -> None:
    model, lines = runs[0].load_model(), sentences(20, seed=3)
    settings = DecodingSettings.model_validate({"method": method})
    alone, twice = (
        translate_lines(ModelEngine(each, settings), runs[0].tokenizers, lines)
        for each in (model, Ensemble([model, runs[0].load_model()]))
    )
    for (one, *_), (two, *_) in zip(alone, twice, strict=True):
        assert one.text == two.text
        assert one.pieces == two.pieces
        assert one.log_prob == pytest.approx(two.log_prob, abs=1e-4)


def test_of_two_goes_by_the_mean_of_probabilities() -> None:
    models = [TinyModel(seed=seed) for seed in (1, 2)]
    sources = random_sources(6, seed=4)
    with torch.no_grad():
        found = beam_search(Ensemble(models), batch_of(sources, 12), DecodingSettings(beam=4))
        single = [beam_search(each, batch_of(sources, 12), DecodingSettings(beam=4)) for each in models]
    for source, hypotheses, lengths, log_probs in zip(
        sources, found.pieces.tolist(), found.lengths.tolist(), found.log_probs.tolist(), strict=True
    ):
        for pieces, length, log_prob in zip(hypotheses, lengths, log_probs, strict=True):
            assert log_prob == pytest.approx(ensemble_log_prob(models, source, pieces[:length]), abs=1e-4)
    assert all(found.pieces.shape != each.pieces.shape or (found.pieces != each.pieces).any() for each in single)


def test_steps_and_forced_decoding_agree_across_attentions(runs: list[Run]) -> None:
    ensemble, tokenizers = Ensemble([run.load_model() for run in runs]), runs[0].tokenizers
    lines = sentences(10, seed=9)
    found = translate_lines(ModelEngine(ensemble, DecodingSettings(beam=4, n_best=4)), tokenizers, lines)
    for line, translations in zip(lines, found, strict=True):
        for each in translations:
            source = torch.tensor([[*tokenizers.source.encode(line), EOS]])
            with torch.no_grad():
                forced = forced_log_probs(ensemble, source, torch.tensor([each.pieces])).sum(1)
            assert forced.item() == pytest.approx(each.log_prob, abs=1e-3)


def test_limits_and_weights_are_those_that_all_have() -> None:
    models = [TinyModel(seed=1), TinyModel(seed=2)]
    models[0].longest_source, models[1].longest_source, models[1].longest_target = 9, 7, 5
    ensemble = Ensemble(models)
    assert (ensemble.longest_source, ensemble.longest_target, ensemble.has_weights) == (7, 5, True)
    batch = batch_of([[4, 5]], 5)
    state = ensemble.start(ensemble.encode(batch.source, batch.valid), hypotheses=2)
    _, _, weights = ensemble.step(torch.tensor([[2, 2]]), state, need_weights=True)
    assert weights is not None
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2))
    models[1].has_weights = False
    assert not Ensemble(models).has_weights


def test_the_mean_is_of_probabilities() -> None:
    one, two = torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])
    assert torch.allclose(mean_of([one.log(), two.log()]).exp(), torch.tensor([0.4, 0.6]))


def test_evaluation_mode_and_back(runs: list[Run], tmp_path: Path) -> None:
    ensemble = Ensemble([run.load_model() for run in runs])
    ensemble.train()
    translate_lines(ModelEngine(ensemble, DecodingSettings()), runs[0].tokenizers, ["The dog."])
    assert all(each.training for each in ensemble.networks)


def test_equals_the_sum_over_steps_whatever_the_batch() -> None:
    model = TinyModel()
    sources, targets = ([[*each, EOS] for each in random_sources(12, seed=seed)] for seed in (1, 2))
    device = model.output_weight.device
    found = forced_log_probs(model, padded(sources, device), padded(targets, device)).sum(1)
    for source, target, log_prob in zip(sources, targets, found.tolist(), strict=True):
        assert log_prob == pytest.approx(log_prob_of(model, source[:-1], target), abs=1e-4)


def test_types_by_name() -> None:
    assert find_dtype("auto") is None
    assert find_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(MtkitError, match="float32"):
        find_dtype("int4")


def cuda_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fails", [cuda_out_of_memory, lambda: torch.empty(1 << 50)])
def test_memory_that_gives_out_is_one_clear_error(fails: Callable[[], object]) -> None:
    model = TinyModel().train()
    with (
        pytest.raises(MtkitError, match="single segment to translate; lower"),
        decoding_with(model, None),
    ):
        fails()
    assert model.training


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), decoding_with(TinyModel(), None):
        torch.ones(2) + torch.ones(3)


def test_decoding_leaves_the_model_as_it_was() -> None:
    model = TinyModel().train()
    with decoding_with(model, torch.bfloat16):
        assert not model.training
        assert not (model.weight * 2).requires_grad
    assert model.training
    with decoding_with(model, None):
        assert (model.weight @ model.weight.T).dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "role"), [(each.name, role) for each in mechanisms().values() for role in sorted(each.roles)]
)
def test_what_decoding_leaves_behind_can_be_trained_with(name: str, role: str, dtype: torch.dtype | None) -> None:
    """As validation amid training does: what attentions keep from call to call must serve both."""
    sizes = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1, "max_length": 48}
    recipe = make_recipe({"model": sizes, "attention": {role: name}})
    model = build_model(recipe, source_vocabulary=32, target_vocabulary=32)
    sources = random_sources(3, vocabulary=32, longest=20)
    with decoding_with(model, dtype):
        beam_search(model, batch_of(sources, 8), DecodingSettings(beam=2))
    model.train()
    batch = batch_of(sources, 8)
    output = model(batch.source, batch.source, source_valid=batch.valid)
    (model.logits(output.hidden).log_softmax(-1)[..., 4:].sum() + sum(output.losses.values())).backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    model.after_update(1, 10)
    with decoding_with(model, dtype):
        beam_search(model, batch_of(sources, 8), DecodingSettings(beam=2))
