"""The rate of matrix products."""

import pytest
import torch

from mtkit import product_rate as measured
from mtkit.product_rate import ARITHMETICS, arithmetic_of, product_rate


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LARGE", {"cpu": 32})
    monkeypatch.setattr(measured, "BLOCK_SECONDS", 1e-4)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "int8"])
def test_every_size_and_a_large_one_are_measured(arithmetic: str) -> None:
    rate = product_rate(arithmetic, torch.device("cpu"), (8, 16))
    assert rate is not None
    assert list(rate.by_size) == [8, 16, 32]
    assert 0 < min(rate.by_size.values()) <= rate.best == max(rate.by_size.values())


def test_an_arithmetic_that_the_machine_has_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(measured, "_product", refuse)
    assert product_rate("float32", torch.device("cpu"), (8,)) is None


def test_the_rate_counts_two_operations_for_each_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "seconds_of", lambda work, device: 0.5)  # every block, however many products it has
    monkeypatch.setattr(measured, "BLOCK_SECONDS", 2.0)  # four products a block
    rate = product_rate("float32", torch.device("cpu"), (8,))
    assert rate is not None
    assert rate.by_size[8] == 2 * 8**3 * 4 / 0.5


def test_a_precision_is_measured_in_the_arithmetic_it_begins_with() -> None:
    assert {name: arithmetic_of(name) for name in ARITHMETICS} == {name: name for name in ARITHMETICS}
    assert arithmetic_of("int8_float16") == "int8"
    assert arithmetic_of("auto") == "float32"
