"""What compiled loops share: compilation, the exponential, and rounding to bytes."""

import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from mtkit.attention.kernels.cpu import machine_code
from mtkit.attention.kernels.cpu.machine_code import (
    ZERO,
    bits_of,
    compiled,
    exponential,
    of_bits,
    round_rows,
    scale_rows,
)


def doubled(numbers: np.ndarray[Any, Any]) -> None:
    for place in range(len(numbers)):
        numbers[place] *= 2


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("cannot cache function 'doubled': no locator available for file 'loops.py'"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_loop_is_compiled_where_nothing_can_be_kept(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(loop: object) -> None:
        raise fault

    monkeypatch.setattr(machine_code, "_CodeCache", refused)
    numbers = np.arange(3, dtype=np.float32)
    compiled("float32[::1]")(doubled)(numbers)
    assert numbers.tolist() == [0, 2, 4]


def test_code_from_the_cache_is_loaded_without_the_compiler() -> None:
    loops = importlib.import_module("mtkit.attention.kernels.cpu.decoding_loops")  # its code is in the cache then
    script = f"import sys, {loops.__name__}; sys.exit('numba.np.linalg' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@njit  # type: ignore[untyped-decorator]
def there(x: np.float32) -> np.int32:
    return bits_of(x)


@njit  # type: ignore[untyped-decorator]
def back(bits: np.int32) -> np.float32:
    return of_bits(bits)


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -3.75, np.inf, 1e-40])
def test_bits_are_those_that_numpy_sees(number: float) -> None:
    x = np.float32(number)
    assert there(x) == x.view(np.int32)
    assert np.float32(back(there(x))).view(np.int32) == x.view(np.int32)


def test_it_is_the_exponential() -> None:
    x = np.concatenate([-np.logspace(-8, np.log10(87), 400), -np.linspace(0, 87, 401)]).astype(np.float32)
    found = np.array([exponential(each) for each in x], dtype=np.float64)
    expected = np.exp(x.astype(np.float64))
    # the product with log2(e) is rounded, which counts for more where it is larger
    assert (abs(found - expected) <= expected * (2e-7 + 1e-7 * abs(x))).all()
    assert exponential(np.float32(0)) == 1


def test_far_below_it_is_next_to_nothing() -> None:
    for x in (-88.0, -1e4, -1e30, -np.inf):
        assert 0 <= exponential(np.float32(x)) <= 2.0**-126


def test_nan_stays() -> None:
    assert np.isnan(exponential(np.float32(np.nan)))


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    whole, units = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(len(rows))
    round_rows(rows.numpy(), whole.numpy(), units.numpy())
    return whole, units


@pytest.mark.parametrize("width", [1, 7, 64, 256, 1023])
def test_each_row_is_rounded_in_its_own_unit(width: int) -> None:
    rows = torch.randn(9, width) * torch.logspace(-20, 20, 9)[:, None]
    rows[4] = torch.arange(width) / 2 - 30  # halves
    rows[4, 0] = 127.0
    whole, units = rounded(rows)
    expected = rows.abs().amax(1) / 127
    assert torch.equal(units, expected)
    assert torch.equal(whole, ((rows / expected[:, None]).round() + ZERO).to(torch.uint8))
    assert (whole.int() - ZERO).abs().amax(1).tolist() == [127] * 9


def test_a_row_of_zeros_stays_one() -> None:
    whole, units = rounded(torch.zeros(2, 5))
    assert (whole == ZERO).all()
    assert (units > 0).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_the_unit(number: float) -> None:
    rows = torch.randn(3, 40)
    rows[1, 17] = number
    units = rounded(rows)[1]
    assert units.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("width", [1, 7, 300])
def test_sums_are_scaled_row_by_row(width: int) -> None:
    sums, units, bias = torch.randn(4, width), torch.rand(4), torch.randn(width)
    expected = torch.addcmul(bias.double(), sums.double(), units[:, None].double())
    out = torch.empty_like(sums)
    scale_rows(sums.numpy(), units.numpy(), bias.numpy(), out.numpy())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    scale_rows(sums.numpy(), units.numpy(), bias.numpy(), sums.numpy())
    assert np.array_equal(sums.numpy(), out.numpy())
