"""The end of a training of several processes by a signal."""

import os
import signal
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.recipe import Recipe, make_recipe
from mtkit.training.checkpoint import Checkpoints
from mtkit.training.train import train
from tests.processes import together
from tests.training.conftest import TINY


def stopped(recipe: Recipe, folder: Path) -> tuple[float, float]:
    """When this process has written a checkpoint, which takes it a second, and when it has left; one gets SIGTERM."""
    save, written = Checkpoints.save, [0.0]

    def slowly(self: Checkpoints, *arguments: Any) -> Path:
        sleep(1.0)
        path = save(self, *arguments)
        written[0] = monotonic()
        return path

    def say(line: str) -> None:
        if line.startswith("update 4/"):
            signal.raise_signal(signal.SIGTERM)

    Checkpoints.save = slowly  # type: ignore[method-assign]
    train(recipe, open_prepared(recipe.data.folder), folder, command=["mtkit"], device="cpu", say=say)
    return written[0], monotonic()


def previewed(recipe: Recipe, folder: Path) -> int:
    """The updates of a preview, in a folder that no other process has."""
    own = folder / os.environ["RANK"] / "run"
    prepared = open_prepared(recipe.data.folder)
    return train(recipe, prepared, own, command=["mtkit"], device="cpu", preview=True).progress.update


def test_processes_preview_a_training_together(prepared: Prepared, tmp_path: Path) -> None:
    training = TINY["training"] | {"max_updates": 2}
    recipe = make_recipe(TINY | {"training": training, "data": {"folder": str(prepared.folder)}})
    assert together(2, previewed, recipe, tmp_path) == [2, 2]


def test_none_leaves_before_the_checkpoint_is_written(prepared: Prepared, tmp_path: Path) -> None:
    # a launcher ends the others, soon after one has left
    training = TINY["training"] | {"max_updates": 50, "log_every": 2, "validate_every": 50}
    recipe = make_recipe(TINY | {"training": training, "data": {"folder": str(prepared.folder)}})
    (written, _), (_, other_left) = together(2, stopped, recipe, tmp_path)
    assert 0.0 < written <= other_left
