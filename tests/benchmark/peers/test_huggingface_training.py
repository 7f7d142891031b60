import pytest
import torch

from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.training.data_loader import DataLoader
from mtkit.training.world import World
from tests.training.conftest import tiny

pytestmark = pytest.mark.peer
pytest.importorskip("transformers")


def test_it_learns_on_mtkits_batches_with_mtkits_loss(prepared: Prepared) -> None:
    from mtkit.benchmark.peers.huggingface_training import HuggingFaceTrainer

    world = World("cpu")
    recipe = tiny(model={"dropout": 0.0}).model_copy(update={"data": prepared.settings})
    trainer = HuggingFaceTrainer(recipe, prepared, world, "float32")
    work = next(DataLoader(recipe, prepared, 100, world).updates(0, 0))
    (batch,) = work.batches
    with torch.no_grad():
        logits = trainer.model(
            input_ids=batch.source, attention_mask=batch.source_valid.long(), decoder_input_ids=batch.target_in
        ).logits
    log_probs = logits.log_softmax(-1)
    right = log_probs.gather(-1, batch.target_out[..., None]).squeeze(-1)
    smoothed = -0.9 * right - 0.1 * log_probs.mean(-1)
    trainer.update(work, 1)
    first = trainer.read_loss()
    assert first == pytest.approx(float(smoothed[batch.target_valid].sum()), rel=1e-4)
    for number in range(2, 12):
        trainer.update(work, number)
    trainer.read_loss()
    trainer.update(work, 12)
    assert trainer.read_loss() < 0.9 * first


def test_what_it_cannot_do_is_refused(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtkit.benchmark.peers.huggingface_training import HuggingFaceTrainer

    recipe, world = tiny(), World("cpu")
    with pytest.raises(MtkitError, match="precision"):
        HuggingFaceTrainer(recipe, prepared, world, "int4")
    with pytest.raises(MtkitError, match="R-Drop"):
        HuggingFaceTrainer(tiny(training={"r_drop": 5.0}), prepared, world, "float32")
    world.size = 2
    with pytest.raises(MtkitError, match="torchrun"):
        HuggingFaceTrainer(recipe, prepared, world, "float32")
