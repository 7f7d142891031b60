"""The process's arithmetic in training: what `training.deterministic` asks of a GPU, and what it leaves behind."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.model.build import build_model
from mtkit.runs import Run
from mtkit.training import update
from mtkit.training.precision import Precision, fast_and_repeatable, fixed_workspaces, why_not_exact
from mtkit.training.train import train
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import tiny

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def modes() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.fixture(autouse=True)
def all_is_as_it_was() -> Iterator[None]:
    before, filters, workspace = modes(), list(warnings.filters), os.environ.get(WORKSPACE)
    yield
    assert (modes(), list(warnings.filters), os.environ.get(WORKSPACE)) == (before, filters, workspace)


def test_a_gpu_is_asked_strictly_where_training_is_deterministic_and_else_as_far_as_it_goes() -> None:
    with fast_and_repeatable(CUDA, deterministic=True):
        assert modes() == (True, False, False)
    with fast_and_repeatable(CUDA):
        assert modes() == (True, True, False)
    with fast_and_repeatable(CPU, deterministic=True):
        assert modes()[0] is False, "there it is so in any case"


def test_the_caller_s_modes_come_back_after_an_error_too() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(KeyError), fast_and_repeatable(CUDA, deterministic=True):
            raise KeyError
        assert modes()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = """
import sys, torch
from mtkit.training.precision import fast_and_repeatable
with fast_and_repeatable(torch.device("cpu")):
    pass
sys.exit("torch._inductor" in sys.modules)
"""


def test_the_arithmetic_of_a_cpu_does_not_import_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", SETTINGS], check=True)


def test_a_training_is_the_same_whatever_its_caller_does(prepared: Prepared, tmp_path: Path) -> None:
    def weights(name: str) -> torch.Tensor:
        train(tiny(training={"max_updates": 1}), prepared, tmp_path / name, command=[], device="cpu")
        return Run(tmp_path / name).load_model().output_weight

    wanted = weights("alone")
    callers = {
        "inference": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    for name, caller in callers.items():
        with caller:
            assert weights(name).equal(wanted)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    torch.set_flush_denormal(True)
    try:
        assert weights("seeded").equal(wanted)
        assert torch.tensor(1e-40) * 1.0 == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert torch.rand(3).equal(drawn)


def test_an_operation_without_a_deterministic_form_is_one_clear_error() -> None:
    with (
        pytest.raises(RunError, match=r"put_.*training\.deterministic: false") as error,
        fast_and_repeatable(CUDA, deterministic=True),
    ):
        torch.zeros(3).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="size"), fast_and_repeatable(CUDA, deterministic=True):
        torch.ones(2) + torch.ones(3)


def test_cublas_sums_in_one_order_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    with fixed_workspaces(False):
        assert WORKSPACE not in os.environ
    with fixed_workspaces(True):
        assert os.environ[WORKSPACE] == ":4096:8"
    assert WORKSPACE not in os.environ
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with fixed_workspaces(True):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


def test_it_is_said_that_a_gpu_does_not_repeat_itself(prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    assert why_not_exact(CUDA, deterministic=False) is not None
    assert why_not_exact(CUDA, deterministic=True) is None
    assert why_not_exact(CPU, deterministic=False) is None
    train(
        tiny(training={"max_updates": 1, "deterministic": True}),
        prepared,
        tmp_path,
        command=["mtkit"],
        device="cpu",
        say=said.append,
    )
    assert not [line for line in said if "deterministic" in line]


def test_tf32_is_set_during_updates(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    def products(precision: Precision) -> str:
        seen: list[str] = []
        monkeypatch.setattr(update, "training_step", lambda *_, **__: seen.append(torch.get_float32_matmul_precision()))
        recipe, model = tiny(), build_model(tiny(), **prepared.model_sizes)
        updater = Updater(model, recipe, World("cpu"), precision)
        updater._step([], 1, 1, 0.0)
        return seen[0]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for before in ("highest", "high"):
        torch.set_float32_matmul_precision(before)
        try:
            assert products(Precision("tf32", CUDA)) == "high"
            assert products(Precision("float32", CPU)) == before
            assert torch.get_float32_matmul_precision() == before
        finally:
            torch.set_float32_matmul_precision("highest")


def test_tf32_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"cpu .* has no tf32, .* use --precision float32"):
        Precision("tf32", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Turing")
    with pytest.raises(RunError, match="Turing has no tf32"):
        Precision("tf32", CUDA)
