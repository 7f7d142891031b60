"""A killed training, begun again by the same command, ends with the bits of one that was never killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mtkit.data.prepared import open_prepared
from mtkit.recipe import load_recipe
from mtkit.training.train import train
from tests.training.conftest import TINY
from tests.training.test_loop import assert_same_numbers

UPDATES, EVERY = 30, 6


def test_killed_twice_it_ends_bit_for_bit_as_if_never_killed(prepared_folder: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path / "recipe.yaml", prepared_folder)
    command = [sys.executable, "-m", "mtkit", "train", "--recipe", str(recipe), "--name", "killed", "--threads", "1"]
    run = tmp_path / "mtkit-runs" / "killed"
    for kill_after in (1, 3):
        _kill_once_there(command, tmp_path, run / "checkpoints" / f"update-{kill_after * EVERY:08d}")
        assert not (run / "checkpoints" / f"update-{UPDATES:08d}").exists()
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming mtkit-runs/killed from update" in done.stdout
    settings = load_recipe(recipe)
    whole = tmp_path / "whole"
    train(settings, open_prepared(prepared_folder), whole, command=command, device="cpu")
    assert_same_numbers(run, whole)


def _kill_once_there(command: list[str], folder: Path, checkpoint: Path) -> None:
    """Start the command and kill it, with no chance to react, some updates after a checkpoint has appeared."""
    process = subprocess.Popen(
        command, cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.03)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


def _recipe(path: Path, data: Path) -> Path:
    import yaml

    training = TINY["training"] | {"max_updates": UPDATES, "validate_every": EVERY, "validate_segments": 1}
    path.write_text(yaml.safe_dump(TINY | {"training": training, "data": {"folder": str(data)}}))
    return path


def _environment() -> dict[str, str]:
    root = Path(__file__).parent.parent.parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
