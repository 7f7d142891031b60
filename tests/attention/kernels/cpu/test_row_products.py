import numpy as np
import pytest

from mtkit.attention.kernels.cpu.machine_code import Floats, compiled
from mtkit.attention.kernels.cpu.row_products import COLUMNS, Places, write_four_products, write_weighted_sum

ROWS, FIRST, STEP, COUNT = 24, 2, 3, 5


@compiled("float32[::1], float32[:, ::1], int64[::1], float32[::1]")
def four_products(query: Floats, rows: Floats, place: Places, out: Floats) -> None:
    write_four_products(query, rows, place[0], place[1], place[2], place[3], out, 1)


@compiled("float32[::1], float32[:, ::1], int64[::1], float32[::1]")
def weighted_sum(weight: Floats, rows: Floats, place: Places, out: Floats) -> None:
    for column in range(0, len(out), COLUMNS):
        write_weighted_sum(weight, rows, FIRST, STEP, place, len(weight), out, column)


def numbers(*shape: int) -> Floats:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 48, 63, 64, 65, 80, 130])
def test_products_and_sums_are_those_of_numpy_and_touch_nothing_else(width: int) -> None:
    place = np.array([7, 0, 3, 3, 5])
    beyond = np.full((ROWS + 1, width), np.nan, np.float32)  # a read after the last row would show
    rows = beyond[:ROWS]
    rows[:] = numbers(ROWS, width)
    query, out = numbers(width), np.zeros(6, np.float32)
    four_products(query, rows, place, out)
    np.testing.assert_allclose(out[1:5], rows[place[:4]].astype(float) @ query.astype(float), rtol=1e-5, atol=1e-5)
    assert (out[0], out[5]) == (0, 0)

    weight, around = numbers(COUNT), np.full(width + 2, 7, np.float32)
    total = around[1:-1]
    weighted_sum(weight, rows, place, total)
    expected = weight.astype(float) @ rows[FIRST + STEP * place].astype(float)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
    assert (around[0], around[-1]) == (7, 7)


def test_a_sum_of_no_rows_is_zero() -> None:
    total = numbers(70)
    weighted_sum(numbers(0), numbers(ROWS, 70), np.zeros(0, np.int64), total)
    assert (total == 0).all()
