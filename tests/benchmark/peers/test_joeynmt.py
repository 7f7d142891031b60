from typing import Any

import pytest
import torch

from mtkit.data.prepared import Prepared
from mtkit.decoding.lines.batches import padded
from mtkit.errors import MtkitError
from mtkit.text.tokenizer import BOS, EOS, PAD
from mtkit.training.data_loader import DataLoader
from mtkit.training.world import World
from tests.decoding.engines.plain import recipe_of, shifted_model
from tests.training.conftest import tiny

pytestmark = pytest.mark.peer
pytest.importorskip("joeynmt")


@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"activation": "gelu"}], ids=str)
def test_it_gives_the_same_logits(changes: dict[str, Any]) -> None:
    from mtkit.benchmark.peers.joeynmt import convert

    recipe = recipe_of(**changes)
    model = shifted_model(recipe)
    source = padded([[5, 9, 30, 7, EOS], [11, 6, EOS]], torch.device("cpu"))
    target_in = torch.tensor([[BOS, 8, 21, 6], [BOS, 33, 4, 17]])
    theirs, mask = convert(recipe, model), (source != PAD).unsqueeze(1)
    with torch.no_grad():
        hidden = model(source, target_in, source_valid=source != PAD).hidden
        encoded, state, *_ = theirs(return_type="encode", src=source, src_length=mask.sum((1, 2)), src_mask=mask)
        found, *_ = theirs(
            return_type="decode",
            trg_input=target_in,
            encoder_output=encoded,
            encoder_hidden=state,
            src_mask=mask,
            unroll_steps=4,
            trg_mask=torch.ones(2, 1, 4, dtype=torch.bool),
        )
    torch.testing.assert_close(found, hidden @ model.output_weight.T, atol=1e-4, rtol=1e-4)


def test_models_that_it_does_not_have_are_refused() -> None:
    from mtkit.benchmark.peers.joeynmt import convert

    recipe = recipe_of(positions="learned")
    with pytest.raises(MtkitError, match="positions = sinusoidal"):
        convert(recipe, shifted_model(recipe))


def test_it_learns_on_mtkits_batches(prepared: Prepared) -> None:
    from mtkit.benchmark.peers.joeynmt import JoeyTrainer

    world = World("cpu")
    recipe = tiny(model={"dropout": 0.0}).model_copy(update={"data": prepared.settings})
    trainer = JoeyTrainer(recipe, prepared, world, "float32")
    work = next(DataLoader(recipe, prepared, 100, world).updates(0, 0))
    trainer.update(work, 1)
    first = trainer.read_loss()
    for number in range(2, 12):
        trainer.update(work, number)
    trainer.read_loss()
    trainer.update(work, 12)
    assert trainer.read_loss() < 0.9 * first
