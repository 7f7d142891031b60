from pathlib import Path

import pytest
import torch

from mtkit.benchmark import machine
from mtkit.benchmark.machine import ARITHMETICS, arithmetic_of, busy_note, product_rate


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LARGE", {"cpu": 32})
    monkeypatch.setattr(machine, "BLOCK_SECONDS", 1e-4)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "int8"])
def test_every_size_and_a_large_one_are_measured(arithmetic: str) -> None:
    rate = product_rate(arithmetic, torch.device("cpu"), (8, 16))
    assert rate is not None
    assert list(rate.by_size) == [8, 16, 32]
    assert 0 < min(rate.by_size.values()) <= rate.best == max(rate.by_size.values())


def test_an_arithmetic_that_the_machine_has_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(machine, "_product", refuse)
    assert product_rate("float32", torch.device("cpu"), (8,)) is None


def test_the_rate_counts_two_operations_for_each_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "seconds_of", lambda work, device: 0.5)  # every block, however many products it has
    monkeypatch.setattr(machine, "BLOCK_SECONDS", 2.0)  # four products a block
    rate = product_rate("float32", torch.device("cpu"), (8,))
    assert rate is not None
    assert rate.by_size[8] == 2 * 8**3 * 4 / 0.5


def test_a_precision_is_measured_in_the_arithmetic_it_begins_with() -> None:
    assert {name: arithmetic_of(name) for name in ARITHMETICS} == {name: name for name in ARITHMETICS}
    assert arithmetic_of("int8_float16") == "int8"
    assert arithmetic_of("auto") == "float32"


@pytest.mark.parametrize(
    ("running", "threads", "said"),
    [
        (1, 2, None),
        (4, 2, "other processes keep 3 of 4 cores busy, and this one uses 2"),
        (3, 3, "2 of 4"),
        (2, 3, None),
    ],
)
def test_other_work_is_noticed(running: int, threads: int, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"9.00 9.00 9.00 {running}/500 12345\n")
    message = busy_note(threads, seconds=0.0)
    assert (message is None) == (said is None)
    assert said is None or said in str(message)


def test_elsewhere_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert busy_note(10**6, seconds=0.0) is None
