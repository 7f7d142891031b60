"""A training goes on with another number of processes, and after one of them is killed, as if one had done it all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from mtkit.data.prepared import Prepared
from mtkit.recipe import load_recipe
from mtkit.training.checkpoint import read_progress, verified_tensors
from mtkit.training.train import train
from tests.training.conftest import TINY

ROOT = str(Path(__file__).parents[3])


def recipe_of(folder: Path, prepared: Prepared, updates: int) -> Path:
    """Uneven batches, two per update, so small that some leave a process nothing to do."""
    training = TINY["training"] | {"batch_tokens": 40, "max_updates": updates, "accumulate": 2, "validate_every": 4}
    path, model = folder / "recipe.yaml", TINY["model"] | {"dropout": 0.0}
    settings = TINY | {"training": training, "model": model, "data": {"folder": str(prepared.folder)}}
    path.write_text(yaml.safe_dump(settings))
    return path


def torchrun(folder: Path, recipe: Path, processes: int, *more: str) -> "subprocess.Popen[str]":
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *more]
    return subprocess.Popen(
        [*command, "-m", "mtkit", "train", "--recipe", str(recipe), "--name", "run", "--threads", "1"],
        cwd=folder,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_alike(theirs: Path, ours: Path) -> None:
    """Same place in training, and weights that differ by rounding alone."""
    assert read_progress(theirs).tokens == read_progress(ours).tokens
    first, second = verified_tensors(theirs, "model"), verified_tensors(ours, "model")
    # a key's bias cancels in the softmax: its gradient is nothing but rounding, which Adam scales up to whole steps
    for name in [name for name in second if not name.endswith("k_proj.bias")]:
        torch.testing.assert_close(first[name], second[name], rtol=0.0, atol=1e-5, msg=name)


def test_two_three_and_one_process_go_on_for_one_another(prepared: Prepared, tmp_path: Path) -> None:
    for processes, updates in ((3, 5), (1, 9), (2, 13)):
        started = torchrun(tmp_path, recipe_of(tmp_path, prepared, updates), processes)
        said, _ = started.communicate(timeout=240)
        assert started.returncode == 0, said
    for updates in (5, 9, 13):
        recipe = load_recipe(recipe_of(tmp_path, prepared, updates))
        train(recipe, prepared, tmp_path / "one", command=["mtkit"], device="cpu")
    name = Path("checkpoints") / "update-00000013"
    check_alike(tmp_path / "mtkit-runs" / "run" / name, tmp_path / "one" / name)


@pytest.mark.slow
def test_after_a_process_is_killed_torchrun_starts_all_again_and_nothing_is_lost(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe, run = recipe_of(tmp_path, prepared, 200), tmp_path / "mtkit-runs" / "run"
    started = torchrun(tmp_path, recipe, 4, "--max-restarts=2")
    until = time.monotonic() + 200
    while time.monotonic() < until and not (run / "checkpoints" / "update-00000008").is_dir():
        time.sleep(0.05)
    workers = subprocess.run(
        ["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    said, _ = started.communicate(timeout=400)
    assert started.returncode == 0, said
    assert "resum" in said
    (tmp_path / "whole").mkdir()
    undisturbed = torchrun(tmp_path / "whole", recipe, 4)
    told, _ = undisturbed.communicate(timeout=400)
    assert undisturbed.returncode == 0, told
    last = Path("mtkit-runs/run/checkpoints/update-00000200")
    found, wanted = (verified_tensors(folder / last, "model") for folder in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "as many processes sum in one order"
