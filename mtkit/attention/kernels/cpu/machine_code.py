"""Shared parts of the compiled loops: decorators, prefetching, a vectorised exponential, rounding of rows to bytes."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, void
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.extending import intrinsic
from numpy.typing import NDArray

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Floats = NDArray[np.float32]

LowFloats = NDArray[np.int16]
"""Numbers in bfloat16, which NumPy does not have."""

HOW: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # a division by zero gives infinity
    # sums may be made in any order, which vector units need; NaN and infinity keep their meaning
    "fastmath": {"nsz", "contract", "reassoc"},
}

IN_ORDER = HOW | {"fastmath": {"nsz", "contract"}}


class _CodeCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of machine code, without its preparations for compiling if the code is in the cache.

    numba would import and register all functions that loops may call, which takes as long as the rest of its start.
    It does so anyway before it compiles.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # the functions that allocate memory
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


def compiled(
    *types: str, in_any_order: bool = True
) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """A decorator of loops over NumPy arrays, which write their results into arguments.

    `types` are the argument types in numba's notation: float32[:, ::1] is a matrix whose rows are whole and one after
    another, float32[:, :] any matrix. A loop for several argument types has one string for each. Sums and products are
    made in the order of the code unless `in_any_order`.
    """
    signatures = [f"void({arguments})" for arguments in types]
    how = HOW if in_any_order else IN_ORDER

    def decorated(loop: Callable[Arguments, None]) -> Callable[Arguments, None]:
        try:
            code = njit(**how)(loop)
            code._cache = _CodeCache(loop)
            for signature in signatures:
                code.compile(signature)
            code.disable_compile()
        except (RuntimeError, OSError):  # no folder can be written in which to keep it, or the disk is full
            code = njit(signatures, **how)(loop)
        return cast(Callable[Arguments, None], code)

    return decorated


def part(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that loops call, compiled with them.

    numba's cached code of a loop lasts until the loop's file changes: after a change of a part in another file,
    remove `__pycache__`.
    """
    code: Callable[Arguments, Result] = njit(**HOW)(function)
    return code


def part_in_order(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A `part` whose sums and products are made in the order of the code."""
    code: Callable[Arguments, Result] = njit(**IN_ORDER)(function)
    return code


PLACE, BYTE, WORD = ir.IntType(64), ir.IntType(8), ir.IntType(32)


def call(builder: Any, name: str, result: ir.Type, *args: Any, **how: Any) -> Any:
    """The result of an instruction of the processor or of LLVM, by its name there."""
    form = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, form, name), args, **how)


def pointer(builder: Any, start: Any, offset: Any, form: ir.Type) -> Any:
    """A pointer to a value of the type, `offset` bytes after the pointer `start`."""
    address = builder.gep(builder.bitcast(start, BYTE.as_pointer()), [offset])
    return builder.bitcast(address, form.as_pointer())


def broadcast(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    """A vector whose lanes are all the number."""
    once = builder.insert_element(vector(ir.Undefined), number, WORD(0))
    return builder.shuffle_vector(once, vector(ir.Undefined), ir.VectorType(WORD, vector.count)(None))


CACHE_LINE = 64
"""Bytes that the processor reads at a time."""


def _request(typing_context: Any, rows: Any, row: Any) -> Any:
    """An intrinsic that prefetches a row (K,) of a matrix."""

    def request(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(rows)(context, builder, args[0])
        (_, width), (row_bytes, number_bytes) = (
            cgutils.unpack_tuple(builder, pair, 2) for pair in (array.shape, array.strides)
        )
        start = pointer(builder, array.data, builder.mul(args[1], row_bytes), BYTE)
        size = builder.add(builder.mul(width, number_bytes), PLACE(CACHE_LINE - 1))
        how = WORD(0), WORD(3), WORD(1)  # to read it, into all levels of the cache, as data
        with cgutils.for_range(builder, builder.sdiv(size, PLACE(CACHE_LINE))) as loop:
            line = pointer(builder, start, builder.mul(loop.index, PLACE(CACHE_LINE)), BYTE)
            call(builder, "llvm.prefetch.p0", ir.VoidType(), line, *how)
        return context.get_dummy_value()

    return void(rows, int64), request


ask_for: Callable[[Floats | LowFloats, int], None] = intrinsic(_request)
"""Prefetches a row (K,) of a matrix, so that a read a little later does not wait for it."""


def _cast(given: Any, wanted: Any, form: ir.Type) -> Any:
    """A function of one number that gives the same 32 bits as a number of another type."""

    def cast(context: Any, x: Any) -> Any:
        return wanted(given), lambda context, builder, signature, args: builder.bitcast(args[0], form)

    return intrinsic(cast)


bits_of: Callable[[np.float32], np.int32] = _cast(float32, int32, WORD)
"""The bits of a float32 as an int32."""

of_bits: Callable[[np.int32], np.float32] = _cast(int32, float32, ir.FloatType())
"""The float32 that has the bits of an int32."""


@part
def bfloat16_bits(x: np.float32) -> np.int16:
    """The bits of x, rounded to bfloat16."""
    bits = bits_of(x)
    nearest = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    return np.int16(0x7FC0) if is_nan else np.int16(nearest)


LOG2_E = np.float32(1.4426950408889634)
LEAST_POWER = np.float32(-126)
"""Exponent of the least normal float32; smaller exponents are raised to it."""

EXPONENT_BITS, EXPONENT_OF_ONE = np.int32(23), np.int32(127)
"""Position of the exponent's lowest bit in a float32, and the biased exponent of 1."""

# 2^f for f from -0.5 to 0.5 is 1 + f times a polynomial of degree 5, interpolated at Chebyshev nodes
C6, C5, C4, C3, C2, C1, C0 = (
    np.float32(coefficient)
    for coefficient in (1.54531629e-4, 1.33908634e-3, 9.61808256e-3, 5.55035711e-2, 2.40226508e-1, 6.93147188e-1, 1.0)
)


@part
def exponential(x: np.float32) -> np.float32:
    """Return exp(x) for x <= 0, with a relative error of at most 2e-7 + 1e-7 |x|."""
    exponent = max(x * LOG2_E, LEAST_POWER)
    integer = np.int32(exponent - np.float32(0.5))  # the nearest integer, as conversion truncates towards zero
    f = exponent - np.float32(integer)
    power = of_bits(np.int32((integer + EXPONENT_OF_ONE) << EXPONENT_BITS))
    return ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f + C0) * power


LARGEST = np.float32(127)
"""Largest rounded number."""

ZERO = 128
"""Byte that represents 0."""

LEAST_UNIT = np.float32(1e-32)
"""Unit for rows of zeros."""

WHOLE = np.float32(3 << 22 | ZERO)
"""Added to a float32, it leaves no bits for a fraction (1.5 * 2^23): the lowest bits are the integer plus ZERO."""


@compiled("float32[:, ::1], uint8[:, ::1], float32[::1]")
def round_rows(rows: Floats, whole: NDArray[np.uint8], units: Floats) -> None:
    """Write rows (M, I) to whole (M or more, I) as bytes, divided by units (M,) that map each row's largest to 127.

    Halves are rounded to even. A row with NaN or infinity has a NaN or infinite unit; its bytes are undefined.
    """
    count, width = rows.shape
    for i in range(count):
        largest = np.int32(0)
        for j in range(width):  # bits of non-negative floats compare like the numbers, with NaN above infinity
            largest = max(largest, np.int32(bits_of(rows[i, j]) & np.int32(0x7FFFFFFF)))
        unit = of_bits(largest) / LARGEST
        unit = LEAST_UNIT if unit < LEAST_UNIT else unit
        units[i] = unit
        for j in range(width):
            whole[i, j] = np.uint8(bits_of(rows[i, j] / unit + WHOLE))


@compiled("float32[:, ::1], float32[::1], float32[::1], float32[:, ::1]")
def scale_rows(sums: Floats, units: Floats, bias: Floats, out: Floats) -> None:
    """Write sums (M, O) * units (M,) + bias (O,) to out (M, O), which may be the same array as sums."""
    count, width = out.shape
    for i in range(count):
        unit = units[i]
        for j in range(width):
            out[i, j] = sums[i, j] * unit + bias[j]
