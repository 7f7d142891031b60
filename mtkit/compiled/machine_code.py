"""The decorators of loops, and of what loops call."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Floats = NDArray[np.float32]

HOW: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # a division by zero gives infinity
    # sums may be made in any order, which vector units need; NaN and infinity keep their meaning
    "fastmath": {"nsz", "contract", "reassoc"},
}


def compiled(
    types: str, *, in_any_order: bool = True
) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """A decorator of loops over NumPy arrays, which write their results into arguments.

    `types` are those of the arguments in numba's words: float32[:, ::1] is a matrix whose rows are whole and one after
    another, float32[:, :] any matrix. Sums and products are made in the order of the code unless `in_any_order`.
    """
    how = HOW if in_any_order else HOW | {"fastmath": {"nsz", "contract"}}

    def decorated(loop: Callable[Arguments, None]) -> Callable[Arguments, None]:
        try:
            code: Callable[Arguments, None] = njit(f"void({types})", cache=True, **how)(loop)
        except (RuntimeError, OSError):  # no folder can be written in which to keep it, or the disk is full
            code = njit(f"void({types})", **how)(loop)
        return code

    return decorated


def part(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that loops call, compiled with them.

    What numba keeps of a loop lasts until the loop's own file changes: after a change here, remove `__pycache__`.
    """
    code: Callable[Arguments, Result] = njit(**HOW)(function)
    return code


CACHE_LINE = 64
"""Bytes that the processor reads at a time."""


def _request(typing_context: Any, rows: Any, row: Any, column: Any) -> Any:
    """A function that asks for the cache line of a number in a matrix."""
    address, number, line = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()

    def request(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = context.make_array(rows)(context, builder, args[0])
        strides = cgutils.unpack_tuple(builder, whole.strides, 2)
        steps = [builder.mul(count, stride) for count, stride in zip(args[1:], strides, strict=True)]
        place = builder.add(builder.ptrtoint(whole.data, address), builder.add(*steps))
        form = ir.FunctionType(ir.VoidType(), [line, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        how = number(0), number(3), number(1)  # to read it, into all levels of the cache, as data
        builder.call(prefetch, [builder.inttoptr(place, line), *how])
        return context.get_dummy_value()

    return void(rows, int64, int64), request


_ask_for: Callable[[Floats, int, int], None] = intrinsic(_request)


@part
def ask_for(rows: Floats, row: int) -> None:
    """Has a row (K,) of a matrix brought into the cache, so that who reads it a little later need not wait for it."""
    for column in range(0, rows.shape[1], CACHE_LINE // 4):
        _ask_for(rows, row, column)


def _cast(given: Any, wanted: Any, form: ir.Type) -> Any:
    """A function of one number that gives the same 32 bits as a number of another type."""

    def cast(context: Any, x: Any) -> Any:
        return wanted(given), lambda context, builder, signature, args: builder.bitcast(args[0], form)

    return intrinsic(cast)


bits_of: Callable[[np.float32], np.int32] = _cast(float32, int32, ir.IntType(32))
"""The bits of a float32 as an int32."""

of_bits: Callable[[np.int32], np.float32] = _cast(int32, float32, ir.FloatType())
"""The float32 that has the bits of an int32."""
