from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.benchmark.training import COUNTED
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lines.batches import padded
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS, PAD
from mtkit.training.data_loader import DataLoader
from mtkit.training.world import World
from tests.decoding.engines.plain import recipe_of, reversing_model, shifted_model, sources_of
from tests.decoding.tiny import batch_of
from tests.decoding.trained import make_run
from tests.training.conftest import tiny

pytestmark = pytest.mark.peer
pytest.importorskip("sockeye")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "post"},
        {"activation": "swish", "positions": "sinusoidal-cat"},
        {"tie": "none", "output_bias": True},
    ],
    ids=str,
)
def test_its_steps_give_the_same_logits(changes: dict[str, Any]) -> None:
    from mtkit.benchmark.peers.sockeye import convert, lengths

    recipe = recipe_of(**changes)
    model = shifted_model(recipe)
    source = padded([[5, 9, 30, 7, EOS], [11, 6, EOS]], torch.device("cpu"))
    target_in = torch.tensor([[BOS, 8, 21, 6], [BOS, 33, 4, 17]])
    theirs, found = convert(recipe, model), []
    with torch.no_grad():
        expected = model.logits(model(source, target_in, source_valid=source != PAD).hidden)
        states, *_ = theirs.encode_and_initialize(source.unsqueeze(2), lengths(source != PAD))
        for pieces in target_in.unsqueeze(2).unbind(1):
            logits, _, states, _ = theirs.decode_step(pieces, states)
            found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("beam", "least"), [(1, 20), (4, 12)])
def test_it_translates_as_mtkit_does(tmp_path: Path, beam: int, least: int) -> None:
    from mtkit.benchmark.peers.sockeye import SockeyeDecoder

    run, settings = make_run(tmp_path / "here").run, DecodingSettings(beam=beam)
    model, batch = reversing_model(run.recipe), batch_of(sources_of(20), 12)
    with torch.no_grad():
        found = SockeyeDecoder(run, model, settings, "float32").generate(batch.source, beam, 12)
    engine = ModelEngine(model, settings)
    with engine.ready():
        expected = engine.translate(batch).pieces[:, 0].tolist()
    found, expected = ([[piece for piece in line[:11] if piece > EOS] for line in lines] for lines in (found, expected))
    assert sum(line == row for line, row in zip(found, expected, strict=True)) >= least  # a beam ends by another rule


@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"activation": "swiglu"}], ids=str)
def test_models_that_it_does_not_have_are_refused(changes: dict[str, Any]) -> None:
    from mtkit.benchmark.peers.sockeye import convert

    recipe = recipe_of(**changes)
    with pytest.raises(MtkitError, match="sinusoidal positions and no swiglu"):
        convert(recipe, shifted_model(recipe))


def test_it_learns_on_mtkits_batches_with_mtkits_loss(prepared: Prepared) -> None:
    from mtkit.benchmark.peers.sockeye import SockeyeTrainer, lengths

    world = World("cpu")
    recipe = tiny(model={"dropout": 0.0}).model_copy(update={"data": prepared.settings})
    trainer = SockeyeTrainer(recipe, prepared, world, "float32")
    batches = DataLoader(recipe, prepared, 100, world).updates(0, 0)
    trainer.update(next(batches), COUNTED + 1)  # compiles the model by this batch
    trainer.read_loss()
    work = next(batches)
    (batch,) = work.batches
    with torch.no_grad():
        source, target_in = batch.source.unsqueeze(2), batch.target_in.unsqueeze(2)
        logits = trainer.model(source, lengths(batch.source_valid), target_in, lengths(batch.target_valid))["logits"]
    log_probs = logits.log_softmax(-1)
    right = log_probs.gather(-1, batch.target_out[..., None]).squeeze(-1)
    smoothed = -0.9 * right - 0.1 * log_probs.mean(-1)
    trainer.update(work, 5)
    first = trainer.read_loss()
    assert first == pytest.approx(float(smoothed[batch.target_valid].sum()), rel=1e-4)
    for number in range(6, 16):
        trainer.update(work, number)
    trainer.read_loss()
    trainer.update(work, 16)
    assert trainer.read_loss() < 0.9 * first
