"""Sums over processes give what one process computes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtkit.data.batches import plan
from mtkit.data.prepared import Prepared
from mtkit.recipe import load_recipe
from mtkit.training.checkpoint import read_progress, verified_tensors
from mtkit.training.loop import train
from tests.training.conftest import TINY

OVERLAPPED = """
from mtkit.training.distributed import gradients

gradients.OVERLAPPED = ("cpu",)
"""
"""What makes sums overlap the backward pass as they do on GPUs."""

TRAIN = """
from mtkit.cli.app import main

main()
"""


def torchrun(script: str, folder: Path, *arguments: str, processes: int) -> str:
    """The output of so many processes that run the script in the folder."""
    path = folder / "script.py"
    path.write_text(script)
    root = str(Path(__file__).parents[3])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, str(path), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("processes", "overlapped", "changes"),
    [
        (2, False, {}),
        (2, False, {"freeze": ["embeddings", "decoder.0.self_attention"]}),
        (2, True, {"freeze": ["embeddings", "decoder.0.self_attention"]}),
        (3, True, {}),
        (2, False, {"shard": True, "ema": 0.9, "average_last": 2}),
        (3, False, {"shard": True, "freeze": ["embeddings", "decoder.0.self_attention"]}),
    ],
    ids=["flat", "flat-frozen", "overlapped-frozen", "overlapped", "split", "split-frozen"],
)
def test_processes_give_what_one_gives_on_the_same_global_batches(
    processes: int, overlapped: bool, changes: dict[str, Any], prepared: Prepared, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    # small batches, so that some hold one segment and leave a process nothing to do
    training = TINY["training"] | {"batch_tokens": 40, "max_updates": 12, "accumulate": 2, "ema": 0.0}
    training |= {"weight_decay": 0.1, "clip_norm": 0.5, **changes}
    model = TINY["model"] | {"dropout": 0.0}
    recipe.write_text(
        yaml.safe_dump(TINY | {"training": training, "model": model, "data": {"folder": str(prepared.folder)}})
    )
    sizes = [len(rows) for rows in plan(prepared.train, batch_tokens=40, max_length=1024, seed=1, epoch=0)[:24]]
    assert 1 in sizes
    script = (OVERLAPPED if overlapped else "") + TRAIN
    said = torchrun(
        script, tmp_path, "train", "--recipe", str(recipe), "--name", "all", "--threads", "1", processes=processes
    )
    assert said.count("update 8: validation loss") == 1, "only the first process speaks"
    train(load_recipe(recipe), prepared, tmp_path / "one", command=["mtkit"], device="cpu")
    name = "update-00000012"
    together, one = tmp_path / "mtkit-runs" / "all" / "checkpoints" / name, tmp_path / "one" / "checkpoints" / name
    assert read_progress(together).tokens == read_progress(one).tokens
    assert (together.parent / "base").is_dir() == ("freeze" in changes)
    files = [(together, one, "model")]
    if "ema" in changes:
        files.append((together, one, "ema"))
    if "average_last" in changes:
        files.append((together.parent / "average", one.parent / "average", "model"))
    for theirs, ours, name in files:
        found, wanted = verified_tensors(theirs, name), verified_tensors(ours, name)
        assert found.keys() == wanted.keys()
        # a key's bias cancels in the softmax: its gradient is nothing but rounding, which Adam scales up to whole steps
        for weight in [each for each in wanted if not each.endswith("k_proj.bias")]:
            torch.testing.assert_close(found[weight], wanted[weight], rtol=0.0, atol=1e-5, msg=f"{name}/{weight}")


SUMS = """
import torch
import torch.distributed as dist
from torch import nn
from mtkit.training.distributed.gradients import FlatSum, OverlappedSum, gradient_sum
from mtkit.training.distributed.world import World

with World("cpu") as world:
    torch.manual_seed(1)
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([used, unused])
    rows = torch.randn(6, 5, 4)

    def objective(x):
        return used(x).square().sum()

    wanted = torch.autograd.grad(sum(map(objective, rows)), list(used.parameters()))
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-2)):
        sum_of = gradient_sum(model, world, dtype)
        assert type(sum_of) is KIND, type(sum_of)
        # of three updates the second leaves the last process without rows
        for processes in (world.size, world.size - 1, world.size):
            for parameter in model.parameters():
                parameter.grad = None
            mine = rows[world.rank :: processes] if world.rank < processes else []
            for place, each in enumerate(mine):
                sum_of.backward(objective(each), last=place == len(mine) - 1)
            if not len(mine):
                sum_of.backward(None, last=True)
            totals = torch.tensor([1.0, float(len(mine))])
            sum_of.finish(totals)
            assert totals.tolist() == [world.size, 6.0], totals
            errors = [
                float((parameter.grad - right).norm() / right.norm())
                for parameter, right in zip(used.parameters(), wanted, strict=True)
            ]
            assert max(errors) < tolerance, (dtype, processes, errors)
            assert dtype == "float32" or max(errors) > 1e-5, "nothing was rounded"
            assert all(not parameter.grad.any() for parameter in unused.parameters())
"""


@pytest.mark.parametrize("kind", ["FlatSum", "OverlappedSum"])
def test_sums_hold_without_rows_without_a_part_and_in_bfloat16(kind: str, tmp_path: Path) -> None:
    before = OVERLAPPED if kind == "OverlappedSum" else ""
    torchrun(before + SUMS.replace("KIND", kind), tmp_path, processes=3)


FULL = """
import pytest
from mtkit.errors import RunError
from mtkit.training.distributed.gradients import OverlappedSum
from mtkit.training.distributed.world import World
import torch

class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

with World("cpu"):
    weight = torch.nn.Parameter(torch.ones(2))
    together = OverlappedSum([weight], torch.float32)
    with pytest.raises(torch.OutOfMemoryError):  # can be made again in halves
        together.backward(Full.apply(weight.sum()), last=False)
    with pytest.raises(RunError, match="gave out in a backward pass while its gradients were being summed"):
        together.backward(Full.apply(weight.sum()), last=True)
"""


def test_memory_that_gives_out_during_a_sum_is_one_clear_error(tmp_path: Path) -> None:
    torchrun(FULL, tmp_path, processes=2)
