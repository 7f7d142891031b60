"""A training whose output nobody takes goes on to its end, without a word about that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.data.prepared import Prepared
from mtkit.training.metrics import read_metrics
from tests.training.conftest import TINY, run, tiny

LAST = "checkpoints/update-00000024"


def test_it_ends_as_it_would_have(prepared: Prepared, tmp_path: Path) -> None:
    def say(line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert run(tiny(), prepared, tmp_path, say=say).trained == 24
    assert (tmp_path / LAST).is_dir()


@pytest.mark.parametrize("reader", ["leaves", "is full"])
def test_as_typed(reader: str, prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    root, full = Path(__file__).parents[2], Path("/dev/full")
    if reader == "is full" and not full.exists():
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "mtkit", "train", "--recipe", "tiny.yaml", "--data", str(prepared.folder)]
    with (
        full.open("wb") if reader == "is full" else open(os.devnull, "wb") as file,
        subprocess.Popen(
            [*command, "--device", "cpu", "--name", "tiny"],
            stdout=file if reader == "is full" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        ) as training,
    ):
        if training.stdout is not None:
            training.stdout.readline()
            training.stdout.close()
        assert training.stderr is not None
        errors = training.stderr.read().decode()
    assert training.returncode == 0, errors
    assert not [each for each in ("Exception", "Broken pipe", "No space") if each in errors], errors
    assert (tmp_path / "mtkit-runs/tiny" / LAST).is_dir()
    assert len(read_metrics(tmp_path / "mtkit-runs/tiny/metrics.jsonl")) == 6 + 3


def test_with_closed_outputs_it_ends_as_it_would_have(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    command = [sys.executable, "-m", "mtkit", "train", "--recipe", "tiny.yaml", "--data", str(prepared.folder)]
    ended = subprocess.run(
        ["sh", "-c", '"$@" >&- 2>&-', "sh", *command, "--device", "cpu", "--name", "tiny"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert ended.returncode == 0
    assert (tmp_path / "mtkit-runs/tiny" / LAST).is_dir()
