"""Tiles of a matrix product: a few rows by 16 or 64 outputs, whose sums stay in the processor's registers.

Numba has no vector types, and the instructions that multiply bytes or bfloat16 numbers have no operator. This inner
loop is therefore written in LLVM's instructions, which are compiled together with the loops that call it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import config, int64, void
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import (
    BYTE,
    PLACE,
    WORD,
    Floats,
    broadcast,
    call,
    compiled,
    part,
    part_in_order,
    pointer,
    round_rows,
)

MOST_ROWS = 6
"""Rows of a tile: their sums take 24 of 32 registers of 512 bits, and the weights 4; 12 of 16 of 256 bits, and 2."""

Numbers = NDArray[Any]
Sums = Callable[[Numbers, Numbers, Numbers, int, int, int], None]
Add = Callable[[Any, Any, Any, Any], Any]
"""(builder, a register of sums, one of numbers, one of weights) -> the sums with the products added, as LLVM values."""


@dataclass(frozen=True)
class Instruction:
    """Adds products of numbers of up to 32 bits to sums of 32 bits, each sum's products from the numbers at its place.

    It is one instruction of the processor, or a few with the same result.
    """

    features: tuple[str, ...]
    """Processor features that it needs, in LLVM's names."""
    lanes: int
    """Sums in a register."""
    registers: int
    """Registers of sums per row of a tile."""
    together: int
    """Numbers in 32 bits."""
    sums: ir.Type
    """The type of a sum."""
    add: Add

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.lanes * self.registers


def _named(name: str) -> Add:
    """One instruction of the processor."""
    return lambda builder, total, numbers, weights: call(builder, name, total.type, total, numbers, weights)


def _add_pairs(builder: Any, total: Any, numbers: Any, weights: Any) -> Any:
    """Products of bytes are summed by twos in 16 bits, which hold 2 * 255 * 63, then these by twos in 32."""
    small, middle = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)
    both = [builder.bitcast(vector, small) for vector in (numbers, weights)]
    twos = call(builder, "llvm.x86.avx2.pmadd.ub.sw", middle, *both)
    return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, twos, middle([1] * 16)))


def _add_floats(builder: Any, total: Any, numbers: Any, weights: Any) -> Any:
    """Products and sums are rounded once."""
    both = [builder.bitcast(vector, total.type) for vector in (numbers, weights)]
    return call(builder, f"llvm.fma.v{total.type.count}f32", total.type, *both, total)


VNNI = Instruction(("avx512vnni",), 16, 4, 4, WORD, _named("llvm.x86.avx512.vpdpbusd.512"))
"""Unsigned bytes times signed ones, in registers of 512 bits."""

PAIRS = Instruction(("avx2",), 8, 2, 4, WORD, _add_pairs)
"""The same in registers of 256 bits, for weights of seven bits."""

BFLOAT16 = Instruction(("avx512bf16",), 16, 4, 2, ir.FloatType(), _named("llvm.x86.avx512bf16.dpbf16ps.512"))
"""Numbers in bfloat16; sums are in float32."""

FLOATS = Instruction(("avx2", "fma"), 8, 2, 1, ir.FloatType(), _add_floats)
"""Numbers in float32."""


AMX = ("amx-tile", "amx-bf16")
"""Processor features for bfloat16 products in tile registers, in LLVM's names (`multiply_by_amx`)."""


def has(instruction: Instruction) -> bool:
    """Whether loops are compiled for a processor that has the instruction."""
    return _has_all(instruction.features)


@cache
def has_amx() -> bool:
    """Whether loops are compiled for a processor with AMX, and the system lets this process use it."""
    return _has_all(AMX) and torch.cpu._init_amx()


def _has_all(wanted: Sequence[str]) -> bool:
    chosen = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # by who set NUMBA_CPU_NAME
    features = binding.get_host_cpu_features()
    return not chosen and all(features.get(feature) for feature in wanted)


BYTES = VNNI if has(VNNI) else PAIRS
"""The instruction by which this processor multiplies bytes, if it `has` it."""


def laid_out(weights: torch.Tensor, instruction: Instruction) -> torch.Tensor:
    """Weights (O, I) as tiles read them, P outputs and `together` T: (O / P, I / T, P, T), with zeros at the ends."""
    outputs, inputs = weights.shape
    tile, together = instruction.outputs, instruction.together
    blocks, steps = -(-outputs // tile), -(-inputs // together)
    padded = weights.new_zeros(blocks * tile, steps * together)
    padded[:outputs, :inputs] = weights
    return padded.view(blocks, tile, steps, together).transpose(1, 2).contiguous()


def each_laid_out(weights: torch.Tensor, instruction: Instruction) -> torch.Tensor:
    """Several matrices (H, O, I), each `laid_out`: (H, O / P, I / T, P, T)."""
    left = -weights.shape[1] % instruction.outputs
    padded = torch.nn.functional.pad(weights, (0, 0, 0, left)) if left else weights
    return laid_out(padded.flatten(0, 1), instruction).unflatten(0, (len(weights), -1))


def sums_by(instruction: Instruction) -> Sums:
    """A function for loops: (numbers (M, I), weights as `laid_out`, sums (R, P), the first row, R, the block).

    It writes the products of 1 to `MOST_ROWS` rows with a block's weights. All are whole in memory;
    numbers after the last input have weights of zero, and may be anything finite.
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


def products_by(instruction: Instruction) -> Callable[[Numbers, Numbers, Numbers, Numbers], None]:
    """A function for loops whose sums are in float32: (numbers (M, I), weights as `laid_out`, added (O,), out (M, O)).

    It writes the product, plus `added`.
    """
    write_sums, size = sums_by(instruction), instruction.outputs

    @part
    def write_products(numbers: Numbers, weights: Numbers, added: Numbers, out: Numbers) -> None:
        count, outputs = out.shape
        sums = np.empty((MOST_ROWS, size), np.float32)
        for block in range(len(weights)):
            start = block * size
            here = min(size, outputs - start)
            for first in range(0, count, MOST_ROWS):
                left = min(count - first, MOST_ROWS)
                write_sums(numbers, weights, sums, first, left, block)
                for r in range(left):
                    of_row = sums[r]
                    for o in range(here):
                        out[first + r, start + o] = of_row[o] + added[start + o]

    return write_products


def _tile(rows: int, instruction: Instruction) -> Callable[[Numbers, Numbers, Numbers, int, int], None]:
    """`sums_by` for one number of rows."""
    line = 4 * instruction.lanes
    sum_vector, words = (ir.VectorType(element, instruction.lanes) for element in (instruction.sums, WORD))
    registers = range(instruction.registers)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def load(start: Any, offset: Any, form: Any) -> Any:
            return builder.load(pointer(builder, start, offset, form), align=1)

        numbers, weights, sums = (
            context.make_array(form)(context, builder, array)
            for form, array in zip(signature.args[:3], args[:3], strict=True)
        )
        first, block = args[3:]
        row_bytes = cgutils.unpack_tuple(builder, numbers.strides, 2)[0]
        block_bytes, step_bytes, *_ = cgutils.unpack_tuple(builder, weights.strides, 4)
        steps = cgutils.unpack_tuple(builder, weights.shape, 4)[1]
        of_block = pointer(builder, weights.data, builder.mul(block, block_bytes), BYTE)
        of_rows = [
            pointer(builder, numbers.data, builder.mul(builder.add(first, PLACE(row)), row_bytes), BYTE)
            for row in range(rows)
        ]
        # what is stored here in the loop, LLVM keeps in registers
        totals = [[cgutils.alloca_once_value(builder, sum_vector(None)) for _ in registers] for _ in range(rows)]
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, step_bytes)
            columns = [load(of_block, builder.add(step, PLACE(line * register)), words) for register in registers]
            for row, of_row in zip(of_rows, totals, strict=True):
                few = load(row, builder.mul(loop.index, PLACE(4)), WORD)
                same = broadcast(builder, few, words)
                for total, column in zip(of_row, columns, strict=True):
                    builder.store(instruction.add(builder, builder.load(total), same, column), total)
        for row, of_row in enumerate(totals):
            for index, total in enumerate(of_row):
                to = pointer(builder, sums.data, PLACE(line * (row * len(registers) + index)), sum_vector)
                builder.store(builder.load(total), to, align=1)
        return context.get_dummy_value()

    def typed(context: Any, numbers: Any, weights: Any, sums: Any, first: Any, block: Any) -> Any:
        return void(numbers, weights, sums, int64, int64), write

    tile: Callable[[Numbers, Numbers, Numbers, int, int], None] = intrinsic(typed)
    return tile


write_products = products_by(FLOATS)


@compiled("float32[:, :, :, ::1], float32[::1], float32[:, ::1], float32[:, ::1]")
def multiply_floats(weights: NDArray[np.float32], added: Floats, rows: Floats, out: Floats) -> None:
    """Write the product (M, O) of rows (M, I) with weights in blocks, plus `added` (O,), to out."""
    write_products(rows, weights, added, out)


write_sums, OUTPUTS = sums_by(BYTES), BYTES.outputs

LEAST = np.float32(-np.inf)

Bytes = NDArray[np.uint8]
Weights = NDArray[np.int8]


WEIGHTS = "Tuple((int8[:, :, :, ::1], int32[::1], float32[::1], float32[::1]))"
"""The type of `ByteWeights`, in numba's notation."""

ByteWeights = tuple[Weights, NDArray[np.int32], Floats, Floats]
"""Integers as `laid_out`; the contribution (O,) of the byte offset (`ZERO`) to each sum; scales (O,); `added` (O,)."""


@part_in_order
def write_byte_products(
    weights: ByteWeights, whole: Bytes, units: Floats, in_units: bool, least: np.float32, out: Floats
) -> None:
    """Write the product (M, O) of bytes (M, I or a little more) in units (M,) with the weights, and `least` if less.

    If `in_units`, out is neither multiplied by units nor added to.
    """
    integers, surplus, scales, added = weights
    count, outputs = out.shape
    sums = np.empty((MOST_ROWS, OUTPUTS), np.int32)
    for block in range(len(integers)):
        start = block * OUTPUTS
        here = min(OUTPUTS, outputs - start)
        for first in range(0, count, MOST_ROWS):
            left = min(count - first, MOST_ROWS)
            write_sums(whole, integers, sums, first, left, block)
            for r in range(left):
                of_row, unit = sums[r], units[first + r]
                for o in range(here):
                    scaled = np.float32(of_row[o] - surplus[start + o]) * scales[start + o]
                    value = scaled if in_units else scaled * unit + added[start + o]
                    out[first + r, start + o] = least if value < least else value  # NaN stays


@compiled(f"{WEIGHTS}, float32[:, ::1], boolean, uint8[:, ::1], float32[::1], float32[:, ::1]", in_any_order=False)
def multiply_bytes(
    weights: ByteWeights, rows: Floats, in_units: bool, whole: Bytes, units: Floats, out: Floats
) -> None:
    """Write the product (M, O) of rows (M, I) with the weights, as `write_byte_products` does.

    `whole` (M, I or a little more) and units (M,) receive the results of `round_rows`.
    """
    round_rows(rows, whole, units)
    write_byte_products(weights, whole, units, in_units, LEAST, out)
