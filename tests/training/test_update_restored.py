from pathlib import Path

import torch

from mtkit.training.objective import Baseline
from mtkit.training.precision import Precision
from mtkit.training.progress import Progress
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import tiny
from tests.training.test_update import CPU, StandIn


def updater() -> Updater:
    return Updater(StandIn(10), tiny(training={"ema": 0.0}), World("cpu"), Precision("float32", CPU))


def test_the_baseline_and_the_count_of_diverging_updates_are_restored() -> None:
    one, other = updater(), updater()
    one.objective.baseline = Baseline(CPU, (-0.7, 0.3))
    for number, nll in enumerate([2.0, 9.0, 9.0], start=1):
        one.divergence.follow(torch.tensor(nll), number)
    progress = one.save_state(Progress(update=3))
    assert (progress.baseline, progress.first_nll, progress.diverging) == ((-0.7, 0.3), 2.0, 2)
    other.restore(progress, one.tensors(), Path("there"))
    assert other.save_state(Progress(update=3)) == progress
