"""Products with rows of a matrix that a loop picks, in LLVM's instructions: all sums stay in the processor's registers.

Numba's own loops keep such sums in memory from row to row.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int64, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import BYTE, PLACE, Floats, broadcast, call, pointer

LANES = 16
"""Numbers in a vector; LLVM makes two registers of it on processors without AVX-512."""

VECTORS = 4
"""Vectors of a sum of rows that are held at a time."""

COLUMNS = LANES * VECTORS
"""Columns of a sum of rows that are written at a time."""

FLOAT, VECTOR = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES)
ALIGNMENT = ir.IntType(32)(4)

Places = NDArray[Any]


def _load(builder: Any, address: Any, mask: Any) -> Any:
    """A vector; lanes whose mask is False are zero."""
    if mask is None:
        return builder.load(address, align=4)
    return call(builder, f"llvm.masked.load.v{LANES}f32.p0", VECTOR, address, ALIGNMENT, mask, VECTOR(None))


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

        def add(offset: Any, mask: Any) -> None:
            some = _load(builder, pointer(builder, asks.data, offset, VECTOR), mask)
            for start, total in zip(starts, totals, strict=True):
                _add_product(builder, total, some, _load(builder, pointer(builder, start, offset, VECTOR), mask))

        full_vectors = builder.sdiv(width, PLACE(LANES))
        with cgutils.for_range(builder, full_vectors) as loop:
            add(builder.mul(loop.index, PLACE(4 * LANES)), None)
        left = builder.sub(width, builder.mul(full_vectors, PLACE(LANES)))
        with builder.if_then(builder.icmp_signed(">", left, PLACE(0)), likely=False):
            add(builder.mul(full_vectors, PLACE(4 * LANES)), _first(builder, left))
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
        offset = builder.mul(args[7], PLACE(4))
        start = pointer(builder, matrix.data, builder.add(builder.mul(args[2], row_bytes), offset), BYTE)
        step_bytes, to = builder.mul(args[3], row_bytes), pointer(builder, total.data, offset, BYTE)
        lines = [PLACE(4 * LANES * number) for number in range(VECTORS)]

        def add(masks: list[Any]) -> None:
            sums = [cgutils.alloca_once_value(builder, VECTOR(None)) for _ in lines]
            for vector_sum in sums:
                builder.store(VECTOR(None), vector_sum)
            with cgutils.for_range(builder, args[5]) as loop:
                number = builder.load(pointer(builder, weights.data, builder.mul(loop.index, PLACE(4)), FLOAT))
                row = builder.load(pointer(builder, places.data, builder.mul(loop.index, PLACE(8)), PLACE))
                address = pointer(builder, start, builder.mul(row, step_bytes), BYTE)
                same = broadcast(builder, number, VECTOR)
                for line, mask, vector_sum in zip(lines, masks, sums, strict=True):
                    _add_product(
                        builder, vector_sum, same, _load(builder, pointer(builder, address, line, VECTOR), mask)
                    )
            for line, mask, vector_sum in zip(lines, masks, sums, strict=True):
                address, value = pointer(builder, to, line, VECTOR), builder.load(vector_sum)
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


write_four_products: Callable[[Floats, Floats, int, int, int, int, Floats, int], None] = intrinsic(_products)
write_weighted_sum: Callable[[Floats, Floats, int, int, Places, int, Floats, int], None] = intrinsic(_sum)
