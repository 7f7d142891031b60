"""What an updater keeps beside the weights: the moving average, and what a resumed run restores."""

from pathlib import Path

import torch
from torch import Tensor, nn

from mtkit.model.build import build_model
from mtkit.training.checkpoint import Progress
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.precision import Precision
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import tiny

CPU = torch.device("cpu")


def updater(precision: str = "float32", **training: object) -> Updater:
    recipe = tiny(training=training)
    model = build_model(recipe, source_vocabulary=16, target_vocabulary=16)
    return Updater(model, recipe, World("cpu"), Precision(precision, CPU))


def test_the_moving_average_decays_by_the_number_of_the_update() -> None:
    steps = updater(ema=0.9)
    assert steps.average is not None
    name, weight = next(iter(steps.model.named_parameters()))
    expected = weight.detach().clone()
    for number in (1, 40):
        nn.init.normal_(weight)
        steps.run(UpdateBatches([], 1, [], 0, 0), number, rate=0.0, total_updates=40)
        decay = min(0.9, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * weight.detach()
    torch.testing.assert_close(steps.average.weights[name], expected)


def test_the_loss_scale_of_float16_is_restored() -> None:
    first, resumed = updater("float16"), updater("float16")
    assert first.precision.scaler is not None
    assert resumed.precision.scaler is not None
    state = {**first.precision.scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7}
    first.precision.scaler.load_state_dict(state)
    files: dict[str, dict[str, Tensor]] = {name: dict(tensors) for name, tensors in first.tensors().items()}
    resumed.restore(first.save_state(Progress(update=3)), files, Path("run"))
    assert resumed.precision.scaler.state_dict() == first.precision.scaler.state_dict()
