"""The check of a GPU: its dry run on the CPU, and all of it on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.check import SECTIONS, Setup, guarded, run_section

MODULES = ("training", "graphs", "contract", "decoding")
COMPARED = [name for name, section in SECTIONS.items() if section.module in MODULES and name != "step_graphs"]
"""Sections that compare; the others measure."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-check")


@pytest.mark.parametrize("name", COMPARED)
def test_each_section_runs_on_the_cpu(name: str, data: Path) -> None:
    results = list(run_section(name, Setup("cpu", True, data)))
    assert results
    assert [result for result in results if result.get("ok", True) is not True] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["machine", *COMPARED])
def test_each_section_passes_on_the_gpu(name: str, data: Path) -> None:
    """In processes of its own, because the first product of a process fixes the setting of cuBLAS."""
    file = data / f"{name}.jsonl"
    command = [sys.executable, "-m", "tests.gpu.check", name, "--data", str(data), "--output", str(file)]
    subprocess.run(command, capture_output=True, check=False)
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert results
    assert [result for result in results if result.get("ok", True) is not True] == []


def test_a_section_that_does_not_end_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.gpu.check",
        "machine",
        "memory",
        "--device",
        "cpu",
        "--tiny",
        "--limit",
        "1",
    ]
    done = subprocess.run(
        [*command, "--data", str(tmp_path), "--output", str(tmp_path / "results.jsonl")],
        capture_output=True,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    stopped = {result["section"]: result["error"] for result in results if result["check"] == "process"}
    assert stopped == dict.fromkeys(("machine", "memory"), "stopped at its limit of 1 s")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_an_error_in_a_check_is_a_result_that_is_not_ok() -> None:
    def fails() -> dict[str, object]:
        raise ValueError("no kernel")

    result = guarded("name", fails)
    assert result["ok"] is False
    assert result["error"] == "ValueError: no kernel"
