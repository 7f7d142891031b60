"""Products in tiles (`mtkit.attention.kernels.cpu.tiles`), for decoding on processors with AVX2 or AVX-512.

They need no kernel for each number of rows, and no pass before or behind them: few rows take a half (float32, AVX2) to
a tenth (int8, AVX2) of the time of the operations they replace, many about as long or less.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FEW = 16
"""Rows that are multiplied fastest in tiles on any processor: AMX takes as long for fewer than these."""


def tiles_pay(count: int) -> bool:
    """Whether tiles of int8 or float32, which one thread computes without AMX, multiply so many rows fastest."""
    return count <= FEW or (torch.get_num_threads() == 1 and not torch.cpu._is_amx_tile_supported())


class Int8Tiles:
    """Rows x, each rounded in a unit of its own, to x W^T + b, with W in integers."""

    def __init__(self, integers: Tensor, scales: Tensor, added: Tensor) -> None:
        """W (O, I) in units of the scales (O,), and b (O,), here called `added`."""
        from mtkit.attention.kernels.cpu.machine_code import ZERO
        from mtkit.attention.kernels.cpu.tiles import BYTES, laid_out, multiply_bytes

        blocks, surplus = laid_out(integers, BYTES), ZERO * integers.sum(1, dtype=torch.int32)
        self._width, self._outputs = blocks.shape[1] * BYTES.together, len(scales)
        weights: list[Any] = [each.numpy() for each in (blocks, surplus, scales, added)]
        self._multiply: Callable[..., None] = partial(multiply_bytes, *weights)

    @classmethod
    def where_possible(cls, integers: Tensor, scales: Tensor, added: Tensor) -> Self | None:
        """None where the processor has neither AVX2 nor AVX-512 with VNNI."""
        from mtkit.attention.kernels.cpu.tiles import BYTES, has

        return cls(integers, scales, added) if has(BYTES) else None

    def __call__(
        self, rows: Tensor, out: Tensor | None = None, *, in_units: bool = False
    ) -> tuple[Tensor, NDArray[np.float32]]:
        """Rows (M, I) to the product (M, O), written to `out` where it is given, and the units (M,) of the rows.

        With `in_units` row m of the product is in units[m], and b is not added.
        """
        count = rows.shape[0]
        whole, units = np.empty((count, self._width), dtype=np.uint8), np.empty(count, dtype=np.float32)
        out = torch.empty(count, self._outputs) if out is None else out
        self._multiply(rows.float().contiguous().numpy(), in_units, whole, units, out.numpy())
        return out, units


class Float32Tiles:
    """Rows x to x W^T + b in float32. A row's result does not depend on the rows beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """W (O, I) and b (O,) in float32."""
        from mtkit.attention.kernels.cpu.tiles import FLOATS, laid_out, multiply_floats

        self._outputs = len(weight)
        added = torch.zeros(self._outputs) if bias is None else bias.contiguous()
        weights: list[Any] = [each.numpy() for each in (laid_out(weight, FLOATS), added)]
        self._multiply: Callable[..., None] = partial(multiply_floats, *weights)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows (M, I) to the product (M, O), written to `out` where it is given."""
        out = torch.empty(rows.shape[0], self._outputs) if out is None else out
        self._multiply(rows.float().contiguous().numpy(), out.numpy())
        return out


class Bfloat16Tiles:
    """Rows x, rounded to bfloat16, to x W^T + b in float32, with W in bfloat16.

    A row's result does not depend on the rows beside it, nor on the number of threads.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """W (O, I) in bfloat16, and b (O,)."""
        from mtkit.attention.kernels.cpu.tiles import BFLOAT16, has_amx, laid_out

        # imported where the processor has the instructions alone: the import compiles the loop
        if has_amx():
            from mtkit.attention.kernels.cpu.bfloat16_products import INPUTS, multiply_by_amx

            multiply, together = multiply_by_amx, INPUTS
        else:
            from mtkit.attention.kernels.cpu.bfloat16_products import multiply_bfloat16

            multiply, together = multiply_bfloat16, BFLOAT16.together
        self._outputs, inputs = weight.shape
        self._width = -(-inputs // together) * together
        blocks = laid_out(nn.functional.pad(weight, (0, self._width - inputs)), BFLOAT16)
        added = torch.zeros(self._outputs) if bias is None else bias.float()
        weights: list[Any] = [each.numpy() for each in (blocks.view(torch.int16), added)]
        self._multiply: Callable[..., None] = partial(multiply, *weights)

    @classmethod
    def where_possible(cls, weight: Tensor, bias: Tensor | None) -> Self | None:
        """None where the processor does not multiply numbers in bfloat16 in registers of 512 bits."""
        from mtkit.attention.kernels.cpu.tiles import BFLOAT16, has

        return cls(weight, bias) if has(BFLOAT16) else None

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows (M, I) to the product (M, O), written to `out` where it is given."""
        count, width = rows.shape
        low = np.empty((count, self._width), dtype=np.int16)
        low[:, width:] = 0
        out = torch.empty(count, self._outputs) if out is None else out
        arrays, threads = (rows.float().contiguous().numpy(), low, out.numpy()), torch.get_num_threads()
        if threads == 1 or count <= FEW:
            self._multiply(*arrays)
        else:
            size = max(-(-count // threads), FEW)
            parts = [[array[first : first + size] for array in arrays] for first in range(0, count, size)]
            for _ in _pool(os.getpid(), threads).map(lambda part: self._multiply(*part), parts):
                pass  # an error of a part is raised here
        return out


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked copy has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mtkit-tiles")
