import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mtkit.data.batches import plan
from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.recipe import load_recipe
from mtkit.training.checkpoint import read_progress, verified_tensors
from mtkit.training.distributed.world import World
from mtkit.training.loop import train
from tests.training.conftest import TINY


@pytest.mark.parametrize("freeze", [[], ["embeddings", "decoder.0.self_attention"]])
def test_two_processes_give_what_one_gives_on_the_same_global_batches(
    freeze: list[str], prepared: Prepared, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    # small batches, so that some hold one segment and leave a process nothing to do
    training = TINY["training"] | {"batch_tokens": 40, "max_updates": 12, "accumulate": 2, "ema": 0.0}
    training |= {"weight_decay": 0.1, "clip_norm": 0.5, "freeze": freeze}
    model = TINY["model"] | {"dropout": 0.0}
    recipe.write_text(
        yaml.safe_dump(TINY | {"training": training, "model": model, "data": {"folder": str(prepared.folder)}})
    )
    sizes = [len(rows) for rows in plan(prepared.train, batch_tokens=40, max_length=1024, seed=1, epoch=0)[:24]]
    assert 1 in sizes
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mtkit"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*torchrun, "train", "--recipe", str(recipe), "--name", "two", "--threads", "1"],
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update 8: validation loss") == 1, "only the first process speaks"
    train(load_recipe(recipe), prepared, tmp_path / "one", command=["mtkit"], device="cpu")
    name = "update-00000012"
    two, one = tmp_path / "mtkit-runs" / "two" / "checkpoints" / name, tmp_path / "one" / "checkpoints" / name
    assert read_progress(two).tokens == read_progress(one).tokens
    assert (two.parent / "base").is_dir() == bool(freeze)
    theirs, ours = verified_tensors(two, "model"), verified_tensors(one, "model")
    # a key's bias cancels in the softmax: its gradient is nothing but rounding, which Adam scales up to whole steps
    for weight in [name for name in ours if not name.endswith("k_proj.bias")]:
        torch.testing.assert_close(theirs[weight], ours[weight], rtol=0.0, atol=1e-5, msg=weight)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists threads as Linux shows them")
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """One that does may let go of a tensor while the interpreter ends, which aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "from mtkit.training.distributed.world import World\n"
        "with World('cpu') as world:\n"
        "    weight = torch.nn.Parameter(torch.ones(2))\n"
        "    weight.sum().backward()\n"
        "    torch.optim.AdamW([weight]).step()\n"
        "    assert world.agree(1.0 + world.rank) == [2.0]\n"
        "names = [each.read_text() for each in Path('/proc/self/task').glob('*/comm')]\n"
        "assert not [name for name in names if 'gloo' in name], names\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_process_touches_no_other_gpu_than_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", str(device))))
    ones = torch.ones(1)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: calls.append(("allocate", str(device))) or ones)
    assert World(name).device == torch.device("cuda", 1)
    assert calls == [("set", "cuda:1"), ("allocate", "cuda:1")]


def test_a_process_without_a_gpu_of_its_own_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RunError, match="process 1 has no GPU: this machine has 1"):
        World("auto")
    assert World("cpu").device == torch.device("cpu")
