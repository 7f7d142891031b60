"""Output distributions against a decoder that steps, and against forced log-probabilities."""

import math
from pathlib import Path

import pytest
import torch

from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.trained import make_run

SOURCE, TARGET = "The small dog sees the house.", "One old tree likes a bird."


@pytest.fixture(scope="module", params=["transformer", "rnn"])
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    attention = "full" if request.param == "transformer" else "additive"
    made = make_run(tmp_path_factory.mktemp("runs"), architecture=request.param, attention=attention)
    return Translator([made.run])


@torch.no_grad()
def test_each_step_has_the_distribution_of_a_step_of_decoding(translator: Translator) -> None:
    network, tokenizers = translator.network, translator.tokenizers
    pieces = [*tokenizers.target.encode(TARGET), EOS]
    source = torch.tensor([[*tokenizers.source.encode(SOURCE), EOS]])
    state, token = network.start(network.encode(source, torch.ones_like(source, dtype=torch.bool))), BOS
    steps = translator.output_steps(SOURCE, TARGET, top=3)
    assert len(steps) == len(pieces)
    for step, piece in zip(steps, pieces, strict=True):
        logits, state, _ = network.step(torch.tensor([[token]]), state)
        probabilities = logits.whole()[0, 0].softmax(-1).tolist()
        falling = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
        assert step.probability == pytest.approx(probabilities[piece], rel=1e-4)
        assert step.rank == 1 + falling.index(piece)
        assert [value for _, value in step.top] == pytest.approx(
            [probabilities[index] for index in falling[:3]], rel=1e-4
        )
        assert [name for name, _ in step.top] == [*map(tokenizers.target.name, falling[:3])]
        assert step.entropy == pytest.approx(-sum(p * math.log(p) for p in probabilities), rel=1e-4)
        token = piece
    assert steps[-1].piece == "</s>"


def test_probabilities_multiply_to_that_of_the_target(translator: Translator) -> None:
    steps = translator.output_steps(SOURCE, TARGET, top=10_000)
    (forced,) = translator.force_pieces([SOURCE], [TARGET])
    assert sum(math.log(step.probability) for step in steps) == pytest.approx(forced.log_prob, rel=1e-4)
    for step in steps:  # more than there are pieces: all of them
        assert sum(value for _, value in step.top) == pytest.approx(1.0)


def test_what_cannot_be_forced_is_refused(translator: Translator) -> None:
    with pytest.raises(DataError, match="the source is blank"):
        translator.output_steps(" ", TARGET)
    with pytest.raises(MtkitError, match="give one line of text"):
        translator.output_steps("one\ntwo", TARGET)
    with pytest.raises(DataError, match=r"the target has .* pieces"):
        translator.output_steps(SOURCE, TARGET * 10)


def test_a_run_without_attention_weights_has_distributions(tmp_path: Path) -> None:
    run = make_run(tmp_path, architecture="rnn", attention="linear").run
    assert Translator([run]).output_steps(SOURCE, TARGET)[0].top
