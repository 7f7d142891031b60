"""Searches with attentions that read marks: the log-probabilities of documents are those of a whole pass."""

import pytest
import torch

from mtkit.decoding.contract import SourceBatch
from mtkit.decoding.engines.model_engine import SEARCHES, Ensemble, forced_log_probs
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, load_recipe
from mtkit.text.tokenizer import BREAK, EOS, PAD

VOCABULARY = 16
SOURCE = [[7, 8, BREAK, 9, 10, 11, BREAK, 12, EOS], [9, BREAK, 8, 7, EOS], [9, 8, 7, 10, EOS], [BREAK, 7, EOS]]
SIZES = {"d_model": 16, "heads": 2, "max_length": 64, "encoder_layers": 2, "decoder_layers": 2, "output_bias": True}


def network(architecture: str, seed: int = 1) -> Network:
    """A model whose breaks are frequent, and whose segments end at different steps."""
    sizes = SIZES | ({"architecture": "rnn"} if architecture == "rnn" else {"feed_forward": 24, "reversible": False})
    roles = ["cross"] if architecture == "rnn" else ["encoder", "decoder", "cross"]
    attention = dict.fromkeys(roles, "group") | {"options": {"context_layers": 1 if architecture != "rnn" else 0}}
    recipe = load_recipe(None, {"model": sizes, "attention": attention, "seed": seed})
    model = build_model(recipe, source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        assert model.output_bias is not None
        model.output_bias[BREAK] += 4.0
        model.output_bias[EOS] -= 3.0
    return model


def batch() -> SourceBatch:
    width = max(map(len, SOURCE))
    source = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in SOURCE])
    return SourceBatch(source, [20, 12, 9, 16], torch.arange(len(SOURCE)))


@pytest.mark.parametrize("architecture", ["transformer", "rnn", "ensemble"])
@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
@torch.inference_mode()
def test_hypotheses_with_breaks_have_the_log_probabilities_of_a_whole_pass(
    architecture: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.decoding.search.continuations.WORTHWHILE", 0.0)  # finished segments leave at once
    if architecture == "ensemble":
        model: Network | Ensemble = Ensemble([network("transformer"), network("rnn", 2)])
    else:
        model = network(architecture)
    n_best = {"n_best": 3} if method == "sample" else {}
    settings = DecodingSettings.model_validate({"method": method, "beam": 4, "no_repeat_ngram": 1, **n_best})
    hypotheses = SEARCHES[method](model, batch(), settings)
    breaks, words = 0, 0
    for number in range(hypotheses.pieces.shape[1]):
        pieces = hypotheses.pieces[:, number]
        exists = hypotheses.log_probs[:, number] > -torch.inf
        expected = forced_log_probs(model, batch().source, pieces).sum(1)
        torch.testing.assert_close(hypotheses.log_probs[exists, number], expected[exists], atol=2e-4, rtol=0)
        breaks, words = breaks + int((pieces == BREAK).sum()), words + int((pieces > BREAK).sum())
    assert min(breaks, words) > 3, "no hypothesis has several sentences"
