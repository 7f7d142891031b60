"""Compiling loops: with and without a folder to keep the code in, and numbers seen as bits."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from mtkit.attention.kernels.cpu import machine_code
from mtkit.attention.kernels.cpu.machine_code import bits_of, compiled, of_bits


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
    kept = []

    def refusing(signature: str, *, cache: bool = False, **how: Any) -> Any:
        kept.append(cache)
        if cache:
            raise fault
        return njit(signature, **how)

    monkeypatch.setattr(machine_code, "njit", refusing)
    numbers = np.arange(3, dtype=np.float32)
    compiled("float32[::1]")(doubled)(numbers)
    assert numbers.tolist() == [0, 2, 4]
    assert kept == [True, False]


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
