import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtkit.errors import RunError
from mtkit.training.world import World
from tests.processes import together


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists threads as Linux shows them")
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """One that does may let go of a tensor while the interpreter ends, which aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "from mtkit.training.world import World\n"
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


def test_a_single_process_computes_on_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    ones = torch.ones(1)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: ones)
    assert World("cuda:1").device == torch.device("cuda", 1)
    assert calls == ["cuda:1"]


def test_a_process_without_a_gpu_of_its_own_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    messages = set()
    for local in ("1", "2"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(
            RunError, match=r"3 processes need a GPU .* has 1; start 1 here with --nproc-per-node 1"
        ) as caught:
            World("auto")
        messages.add(str(caught.value))
    assert len(messages) == 1  # which is printed once
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RunError, match="this machine has 0; use --device cpu"):
        World("cuda")
    assert World("cpu").device == torch.device("cpu")


def received() -> list[list[float]]:
    with World("cpu") as world:
        numbers, flags = torch.full((2, 3), float(world.rank)).T, torch.tensor([world.rank == 0, True])
        world.send([numbers, flags, torch.empty(0)])
        return [numbers.flatten().tolist(), flags.float().tolist()]


def test_all_processes_get_the_content_of_the_first_one() -> None:
    assert together(2, received) == [[[0.0] * 6, [1.0, 1.0]]] * 2
