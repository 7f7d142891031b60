"""Tiles of a product: a few rows by 64 outputs, whose sums stay in the processor's registers.

Numba has no vectors of its own, and the instructions that multiply bytes or numbers in bfloat16 have no operator. So
this loop alone is written in the instructions of LLVM, which compiles it with the loops that call it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import binding, ir
from numba import config, int64, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mtkit.compiled.machine_code import part

OUTPUTS = 64
"""Outputs of a tile."""

MOST_ROWS = 6
"""Rows of a tile: their sums take 24 of 32 registers, and the weights 4."""

LANES, LINE = 16, 64
"""Numbers of 32 bits in a register, and its bytes."""

Numbers = NDArray[Any]
Sums = Callable[[Numbers, Numbers, Numbers, int, int, int], None]


@dataclass(frozen=True)
class Instruction:
    """Adds the products of numbers of fewer bits to 16 sums of 32 bits: to each those of the numbers at its place."""

    name: str
    """In LLVM."""
    feature: str
    """Of the processor that has it, in LLVM's words."""
    together: int
    """Numbers in 32 bits."""
    sums: ir.Type
    """The type of a sum."""


BYTES = Instruction("llvm.x86.avx512.vpdpbusd.512", "avx512vnni", 4, ir.IntType(32))
"""Unsigned bytes times signed ones."""

BFLOAT16 = Instruction("llvm.x86.avx512bf16.dpbf16ps.512", "avx512bf16", 2, ir.FloatType())
"""Sums are in float32."""


def has(instruction: Instruction) -> bool:
    """Whether loops are compiled for a processor that has the instruction."""
    chosen = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # by who set NUMBA_CPU_NAME
    return not chosen and bool(binding.get_host_cpu_features().get(instruction.feature))


def laid_out(weights: torch.Tensor, together: int) -> torch.Tensor:
    """Weights (O, I) as tiles read them: (O / `OUTPUTS`, I / together, `OUTPUTS`, together), with zeros at the ends."""
    outputs, inputs = weights.shape
    blocks, steps = -(-outputs // OUTPUTS), -(-inputs // together)
    whole = weights.new_zeros(blocks * OUTPUTS, steps * together)
    whole[:outputs, :inputs] = weights
    return whole.view(blocks, OUTPUTS, steps, together).transpose(1, 2).contiguous()


def sums_by(instruction: Instruction) -> Sums:
    """A function for loops: (numbers (M, I), weights as `laid_out`, sums (R, `OUTPUTS`), the first row, R, the block).

    It writes the sums of products of 1 to `MOST_ROWS` rows with the weights of a block. All are whole in memory;
    numbers behind the last input meet weights of zero, and may be anything finite.
    """
    one, two, three, four, five, six = (_tile(rows, instruction) for rows in range(1, MOST_ROWS + 1))

    @part
    def write_sums(numbers: Numbers, weights: Numbers, sums: Numbers, first: int, rows: int, block: int) -> None:
        if rows == 6:
            six(numbers, weights, sums, first, block)
        elif rows == 5:
            five(numbers, weights, sums, first, block)
        elif rows == 4:
            four(numbers, weights, sums, first, block)
        elif rows == 3:
            three(numbers, weights, sums, first, block)
        elif rows == 2:
            two(numbers, weights, sums, first, block)
        else:
            one(numbers, weights, sums, first, block)

    return write_sums


def _tile(rows: int, instruction: Instruction) -> Callable[[Numbers, Numbers, Numbers, int, int], None]:
    """The same for so many rows."""
    sum_of, word, place, byte = instruction.sums, ir.IntType(32), ir.IntType(64), ir.IntType(8)
    vector, whole = ir.VectorType(sum_of, LANES), ir.VectorType(word, LANES)
    registers = range(OUTPUTS // LANES)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def at(start: Any, offset: Any, form: Any = byte) -> Any:
            """A pointer so many bytes behind the start."""
            return builder.bitcast(builder.gep(builder.bitcast(start, byte.as_pointer()), [offset]), form.as_pointer())

        def load(start: Any, offset: Any, form: Any) -> Any:
            return builder.load(at(start, offset, form), align=1)

        numbers, weights, sums = (
            context.make_array(form)(context, builder, array)
            for form, array in zip(signature.args[:3], args[:3], strict=True)
        )
        first, block = args[3:]
        row_bytes = cgutils.unpack_tuple(builder, numbers.strides, 2)[0]
        block_bytes, step_bytes, *_ = cgutils.unpack_tuple(builder, weights.strides, 4)
        steps = cgutils.unpack_tuple(builder, weights.shape, 4)[1]
        of_block = at(weights.data, builder.mul(block, block_bytes))
        of_rows = [at(numbers.data, builder.mul(builder.add(first, place(row)), row_bytes)) for row in range(rows)]
        # what is stored here in the loop, LLVM keeps in registers
        totals = [[cgutils.alloca_once_value(builder, vector(None)) for _ in registers] for _ in range(rows)]
        form = ir.FunctionType(vector, [vector, whole, whole])
        add_products = cgutils.get_or_insert_function(builder.module, form, instruction.name)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, step_bytes)
            columns = [load(of_block, builder.add(step, place(LINE * each)), whole) for each in registers]
            for row, of_row in zip(of_rows, totals, strict=True):
                few = load(row, builder.mul(loop.index, place(4)), word)
                once = builder.insert_element(whole(ir.Undefined), few, word(0))
                same = builder.shuffle_vector(once, whole(ir.Undefined), whole(None))
                for total, column in zip(of_row, columns, strict=True):
                    builder.store(builder.call(add_products, [builder.load(total), same, column]), total)
        for row, of_row in enumerate(totals):
            for each, total in enumerate(of_row):
                to = at(sums.data, place(LINE * (row * len(registers) + each)), vector)
                builder.store(builder.load(total), to, align=1)
        return context.get_dummy_value()

    def typed(context: Any, numbers: Any, weights: Any, sums: Any, first: Any, block: Any) -> Any:
        return void(numbers, weights, sums, int64, int64), write

    tile: Callable[[Numbers, Numbers, Numbers, int, int], None] = intrinsic(typed)
    return tile
