"""Products with rows of a matrix that a loop picks, in LLVM's instructions: all sums stay in the processor's registers.

Numba's own loops keep such sums in memory from row to row. The rows are in float32 or bfloat16, the sums in float32.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, int16, int64, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import BYTE, PLACE, WORD, Floats, LowFloats, broadcast, call, pointer

LANES = 16
"""Numbers in a vector; LLVM makes two registers of it on processors without AVX-512."""

VECTORS = 4
"""Vectors of a sum of rows that are held at a time."""

COLUMNS = LANES * VECTORS
"""Columns of a sum of rows that are written at a time."""

FLOAT, VECTOR = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES)
HALVES, WORDS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(WORD, LANES)
ALIGNMENT = WORD(4)

Places = NDArray[Any]


def _load(builder: Any, address: Any, mask: Any, numbers: Any = float32) -> Any:
    """A vector of float32, from numbers of that type or of bfloat16; lanes whose mask is False are zero."""
    form, name, alignment = (HALVES, "i16", 2) if numbers == int16 else (VECTOR, "f32", 4)
    address = builder.bitcast(address, form.as_pointer())
    if mask is None:
        vector = builder.load(address, align=alignment)
    else:
        name = f"llvm.masked.load.v{LANES}{name}.p0"
        vector = call(builder, name, form, address, WORD(alignment), mask, form(None))
    if form is VECTOR:
        return vector
    upper_half = builder.shl(builder.zext(vector, WORDS), ir.Constant(WORDS, [16] * LANES))
    return builder.bitcast(upper_half, VECTOR)  # a bfloat16 is the upper half of a float32


def _add_product(builder: Any, total: Any, one: Any, other: Any) -> None:
    """Add the products of two vectors to the vector in memory, which LLVM keeps in a register."""
    product = call(builder, f"llvm.fma.v{LANES}f32", VECTOR, one, other, builder.load(total))
    builder.store(product, total)


def _first(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    form = ir.VectorType(PLACE, LANES)
    return builder.icmp_signed("<", ir.Constant(form, list(range(LANES))), broadcast(builder, count, form))


def _numbers(builder: Any, values: Any) -> list[Any]:
    """The numbers of a shape, or of strides."""
    numbers: list[Any] = cgutils.unpack_tuple(builder, values)
    return numbers


def _products(
    typing_context: Any, query: Any, rows: Any, one: Any, two: Any, three: Any, four: Any, out: Any, c: Any
) -> Any:
    """An intrinsic that writes the products of a query (K,) with four rows of a matrix (R, K) from out[c] on."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        asks, matrix, products = (context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 1, 6))
        (width,), (row_bytes, _) = _numbers(builder, asks.shape), _numbers(builder, matrix.strides)
        starts = [pointer(builder, matrix.data, builder.mul(row, row_bytes), BYTE) for row in args[2:6]]
        totals = [cgutils.alloca_once_value(builder, VECTOR(None)) for _ in starts]
        vector_bytes = PLACE(LANES * rows.dtype.bitwidth // 8)

        def add(number: Any, mask: Any) -> None:
            some = _load(builder, pointer(builder, asks.data, builder.mul(number, PLACE(4 * LANES)), VECTOR), mask)
            for start, total in zip(starts, totals, strict=True):
                address = pointer(builder, start, builder.mul(number, vector_bytes), BYTE)
                _add_product(builder, total, some, _load(builder, address, mask, rows.dtype))

        full_vectors = builder.sdiv(width, PLACE(LANES))
        with cgutils.for_range(builder, full_vectors) as loop:
            add(loop.index, None)
        left = builder.sub(width, builder.mul(full_vectors, PLACE(LANES)))
        with builder.if_then(builder.icmp_signed(">", left, PLACE(0)), likely=False):
            add(full_vectors, _first(builder, left))
        for number, total in enumerate(totals):
            name, zero = f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT(-0.0)
            product = call(builder, name, FLOAT, zero, builder.load(total), fastmath=("reassoc",))
            offset = builder.mul(builder.add(args[7], PLACE(number)), PLACE(4))
            builder.store(product, pointer(builder, products.data, offset, FLOAT))
        return context.get_dummy_value()

    return void(query, rows, int64, int64, int64, int64, out, int64), write


def _sum(
    typing_context: Any, weight: Any, rows: Any, first: Any, step: Any, place: Any, count: Any, out: Any, column: Any
) -> Any:
    """An intrinsic that writes `COLUMNS` columns of a weighted sum of rows of a matrix (R, V) to out (V,).

    The rows are first + step * place[c], with weight[c], for c below `count`.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, matrix, places, total = (
            context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 1, 4, 6)
        )
        (width,), (row_bytes, _) = _numbers(builder, total.shape), _numbers(builder, matrix.strides)
        number_bytes = rows.dtype.bitwidth // 8
        offset = builder.add(builder.mul(args[2], row_bytes), builder.mul(args[7], PLACE(number_bytes)))
        start, step_bytes = pointer(builder, matrix.data, offset, BYTE), builder.mul(args[3], row_bytes)
        to = pointer(builder, total.data, builder.mul(args[7], PLACE(4)), BYTE)

        def add(masks: list[Any]) -> None:
            sums = [cgutils.alloca_once_value(builder, VECTOR(None)) for _ in masks]
            for vector_sum in sums:
                builder.store(VECTOR(None), vector_sum)
            with cgutils.for_range(builder, args[5]) as loop:
                number = builder.load(pointer(builder, weights.data, builder.mul(loop.index, PLACE(4)), FLOAT))
                row = builder.load(pointer(builder, places.data, builder.mul(loop.index, PLACE(8)), PLACE))
                address = pointer(builder, start, builder.mul(row, step_bytes), BYTE)
                same = broadcast(builder, number, VECTOR)
                for line, (mask, vector_sum) in enumerate(zip(masks, sums, strict=True)):
                    some = pointer(builder, address, PLACE(number_bytes * LANES * line), BYTE)
                    _add_product(builder, vector_sum, same, _load(builder, some, mask, rows.dtype))
            for line, (mask, vector_sum) in enumerate(zip(masks, sums, strict=True)):
                address, value = pointer(builder, to, PLACE(4 * LANES * line), VECTOR), builder.load(vector_sum)
                if mask is None:
                    builder.store(value, address, align=4)
                else:
                    name = f"llvm.masked.store.v{LANES}f32.p0"
                    call(builder, name, ir.VoidType(), value, address, ALIGNMENT, mask)

        left = builder.sub(width, args[7])
        with builder.if_else(builder.icmp_signed(">=", left, PLACE(COLUMNS)), likely=True) as (all_columns, some):
            with all_columns:
                add([None] * VECTORS)
            with some:
                add([_first(builder, builder.sub(left, PLACE(LANES * number))) for number in range(VECTORS)])
        return context.get_dummy_value()

    return void(weight, rows, int64, int64, place, int64, out, int64), write


write_four_products: Callable[[Floats, Floats | LowFloats, int, int, int, int, Floats, int], None] = intrinsic(
    _products
)
write_weighted_sum: Callable[[Floats, Floats | LowFloats, int, int, Places, int, Floats, int], None] = intrinsic(_sum)
