"""Products of float32 rows that are rounded to bfloat16 first, by the tile registers of AMX.

A tile register holds up to 16 rows of 64 bytes. One instruction multiplies a register of rows, 32 inputs each, by a
register of weights, 32 inputs by 16 outputs, and adds the products to a register of sums in float32.

Import this module only on a processor with AMX: the import compiles the loop, and LLVM ends the process if the
processor lacks an instruction.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.bfloat16_products import Halves, round_to_bfloat16
from mtkit.attention.kernels.cpu.machine_code import BYTE, PLACE, Floats, call, compiled, part, pointer
from mtkit.attention.kernels.cpu.product_tiles import BFLOAT16

MOST_ROWS = 16
"""Rows of a tile register."""

INPUTS = 32
"""Inputs that one instruction multiplies."""

LINE = 64
"""Bytes per row of a tile register."""

SUMS, ROWS, WEIGHTS = range(4), 4, 5
"""The tile registers that are used, out of eight."""

OUTPUTS = BFLOAT16.outputs
"""Outputs per block of weights."""

Shapes = NDArray[np.uint8]


@part
def set_shapes(shapes: Shapes, rows: int) -> None:
    """Write the shapes of the tile registers (64 bytes) for `rows` rows, in the processor's format."""
    shapes[:] = 0
    shapes[0] = 1  # the format
    for register in range(6):
        shapes[16 + 2 * register] = LINE
        shapes[48 + register] = MOST_ROWS if register == 5 else rows


@intrinsic  # type: ignore[untyped-decorator]
def write_sums(
    context: Any, numbers: Any, weights: Any, sums: Any, shapes: Any, first: Any, block: Any
) -> tuple[Any, Any]:
    """Write the sums of rows `first` on, as many as the shapes set, with a block of weights."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def use(name: str, *args: Any) -> None:
            call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)

        def at(start: Any, offset: Any) -> Any:
            return pointer(builder, start, offset, BYTE)

        rows, blocks, out, registers = (
            context.make_array(form)(context, builder, array)
            for form, array in zip(signature.args[:4], args[:4], strict=True)
        )
        row_bytes, out_bytes = (cgutils.unpack_tuple(builder, matrix.strides, 2)[0] for matrix in (rows, out))
        block_bytes, step_bytes, *_ = cgutils.unpack_tuple(builder, blocks.strides, 4)
        inputs = builder.sdiv(cgutils.unpack_tuple(builder, rows.shape, 2)[1], PLACE(INPUTS))
        of_rows = at(rows.data, builder.mul(args[4], row_bytes))
        of_block = at(blocks.data, builder.mul(args[5], block_bytes))
        use("ldtilecfg", at(registers.data, PLACE(0)))
        for register in SUMS:
            use("tilezero", BYTE(register))
        with cgutils.for_range(builder, inputs) as loop:
            use("tileloadd64", BYTE(ROWS), at(of_rows, builder.mul(loop.index, PLACE(LINE))), row_bytes)
            step = at(of_block, builder.mul(loop.index, builder.mul(step_bytes, PLACE(INPUTS // BFLOAT16.together))))
            for register in SUMS:
                use("tileloadd64", BYTE(WEIGHTS), at(step, PLACE(LINE * register)), step_bytes)
                use("tdpbf16ps", BYTE(register), BYTE(ROWS), BYTE(WEIGHTS))
        for register in SUMS:
            use("tilestored64", BYTE(register), at(out.data, PLACE(LINE * register)), out_bytes)
        use("tilerelease")
        return context.get_dummy_value()

    return void(numbers, weights, sums, shapes, int64, int64), write


@compiled("int16[:, :, :, ::1], float32[::1], float32[:, ::1], int16[:, ::1], float32[:, ::1]")
def multiply_by_amx(weights: Halves, added: Floats, rows: Floats, low: Halves, out: Floats) -> None:
    """Write the product (M, O) of rows (M, I) with weights in blocks, plus `added` (O,); sums are in float32.

    low (M, a multiple of `INPUTS`), zero in the columns after the rows, receives the bits of the rounded rows; the
    blocks have as many inputs. A row's result does not depend on other rows.
    """
    round_to_bfloat16(rows, low)
    count, outputs = out.shape
    sums, shapes = np.empty((MOST_ROWS, OUTPUTS), np.float32), np.empty(64, np.uint8)
    for block in range(len(weights)):
        start = block * OUTPUTS
        here = min(OUTPUTS, outputs - start)
        for first in range(0, count, MOST_ROWS):
            left = min(count - first, MOST_ROWS)
            set_shapes(shapes, left)
            write_sums(low, weights, sums, shapes, first, block)
            for r in range(left):
                for o in range(here):
                    out[first + r, start + o] = sums[r, o] + added[start + o]
