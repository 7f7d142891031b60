"""Products in 8-bit integers, for decoding on the CPU: less to multiply and less to read, at nearly the same BLEU.

Weights are rounded once, to seven bits, each output's by a scale of its own (Kim et al., "From Research to Production
and Back: Ludicrously Fast Neural Machine Translation", WNGT 2019); activations at each product, to eight, each row by a
scale of its own, so that no translation depends on its batch. Sums are exact in 32 bits.
"""

import warnings
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtkit.attention.kernels.cpu.product import Int8Tiles, few_counts, in_blocks, tiles_are_faster
from mtkit.errors import MtkitError

LARGEST_WEIGHT = 63
"""Largest rounded weight: seven bits, so that activations can have eight.
Processors without VNNI sum pairs of products in 16 bits first, which hold no more."""


class Int8:
    """x (..., I) to x W^T + b (..., O) in float32, with W (O, I) and x rounded row by row."""

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """W in integers (O, I) int8, its rows in units of the scales (O,)."""
        self._integers, self._scales, self._bias = integers, scales, bias
        self._added = torch.zeros_like(scales) if bias is None else bias
        self._outputs = len(scales)
        self.tiles = Int8Tiles.where_possible(integers, scales, self._added)

    @classmethod
    def rounded(cls, weight: Tensor, bias: Tensor | None) -> "Int8":
        """The product with W (O, I), rounded here, and b (O,)."""
        values = weight.float()
        scales = values.abs().amax(1).clamp(min=1e-12) / LARGEST_WEIGHT
        integers = (values * scales.reciprocal()[:, None]).round().to(torch.int8)
        return cls(integers, scales, None if bias is None else bias.float())

    def of(self, rows: Tensor) -> "Int8":
        """The product with only these rows (K,) of W and b."""
        bias = None if self._bias is None else self._bias[rows]
        return Int8(self._integers[rows], self._scales[rows], bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        return in_blocks(self._of_rows, x, self._outputs)

    def in_units(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., I) to sums (..., O), units (...) and what is added (O,), as in `mtkit.model.network.InUnits`."""
        *before, width = x.shape
        rows = x.reshape(-1, width)
        tiles = self.tiles_for(rows.shape[0])
        sums, units = self._in_units(rows) if tiles is None else tiles(rows, in_units=True)
        return sums.view(*before, -1), torch.from_numpy(units).view(before), self._added

    def _of_rows(self, rows: Tensor, out: Tensor | None) -> Tensor:
        tiles = self.tiles_for(rows.shape[0])
        if tiles is not None:
            return tiles(rows, out)[0]
        from mtkit.attention.kernels.cpu.machine_code import scale_rows

        sums, units = self._in_units(rows)
        out = sums if out is None else out
        scale_rows(sums.numpy(), units, self._added.numpy(), out.numpy())
        return out

    def tiles_for(self, count: int) -> Int8Tiles | None:
        """The tiles if they multiply so many rows fastest."""
        return self.tiles if tiles_are_faster(count, self._integers.numel()) else None

    def _in_units(self, rows: Tensor) -> tuple[Tensor, NDArray[np.float32]]:
        """Sums (M, O) of rows (M, I), and their units (M,)."""
        from mtkit.attention.kernels.cpu.machine_code import round_rows

        count, width = rows.shape
        padded = torch.empty(few_counts(count), width, dtype=torch.uint8)
        units = np.empty(count, dtype=np.float32)
        round_rows(rows.float().contiguous().numpy(), padded.numpy(), units)
        return self._sums(padded)[:count], units

    @cached_property
    def _sums(self) -> "Sums":
        with torch.inference_mode(False):  # it may be asked for inside, and serves outside as well
            return (_whole_sums if has_whole_products() else _dynamic_sums)(self._integers, self._scales)


def check_int8(device: torch.device) -> None:
    """Raises: MtkitError if the device has no int8 products."""
    if device.type != "cpu" or torch.backends.quantized.engine == "none":
        raise MtkitError("int8 runs on CPUs only (x86-64 or Arm); give --device cpu, or --dtype bfloat16")


def has_whole_products() -> bool:
    """Whether oneDNN multiplies whole numbers on this processor exactly and at full speed."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


Sums = Callable[[Tensor], Tensor]
"""Bytes (M, I), in which `ZERO` is 0, to the products (M, O) in float32 with W (O, I), in units of its scales."""


def _whole_sums(integers: Tensor, scales: Tensor) -> Sums:
    """By oneDNN.

    VNNI multiplies unsigned by signed numbers. Signed x has kernels only on processors with AMX; elsewhere oneDNN
    takes its reference loop, which is thousands of times slower.
    """
    from mtkit.attention.kernels.cpu.machine_code import ZERO

    packed = torch.ops.onednn.qlinear_prepack(integers, None)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise

    def sums(whole: Tensor) -> Tensor:
        product: Tensor = multiply(whole, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return product

    return sums


def _dynamic_sums(integers: Tensor, scales: Tensor) -> Sums:
    """By PyTorch's operator with one scale for all rows."""
    from mtkit.attention.kernels.cpu.machine_code import ZERO

    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():  # not for threads, but what it hushes is said once in a process
        warnings.simplefilter("ignore")  # PyTorch announces other ways to int8, which need another package
        weight = torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)
    packed = torch.ops.quantized.linear_prepack(weight, None)

    def sums(whole: Tensor) -> Tensor:
        # the operator takes its unit from the smallest and the largest number: a row more, of both, makes it 1
        bounds = torch.full((1, whole.shape[1]), 127.0)
        bounds[0, 0] = -128.0
        product: Tensor = torch.ops.quantized.linear_dynamic(torch.cat([whole - float(ZERO), bounds]), packed, False)
        return product[:-1]

    return sums
