"""Products of rows with prepared weights, for decoding on the CPU: by PyTorch, by oneDNN, or in `product_tiles`.

Tiled products need AVX2 or AVX-512. They need no kernel for each number of rows, and no pass before or after them. With
few rows, they take a half (float32, AVX2) to a tenth (int8, AVX2) of the time that the replaced operations take; with
many rows, about as long or less.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtkit.attention.kernels.cpu.threads import in_ranges, loops_take
from mtkit.attention.kernels.fused import has_low_products

FEW = 16
"""Rows that are multiplied fastest in tiles on any processor: AMX takes as long for fewer than these."""


MANY, SMALL = 256, 1 << 19
"""Up to so many rows with up to so many weights, int8 tiles are faster than oneDNN on processors with AMX as well: its
rows take a pass before the product and one after it. They take 0.3 (16 rows) to 0.9 times as long."""


def tiles_are_faster(count: int, weights: int) -> bool:
    """Whether tiles of int8 or float32, which one thread computes without AMX, multiply so many rows fastest."""
    if count <= FEW:
        return True
    amx = torch.cpu._is_amx_tile_supported()
    return torch.get_num_threads() == 1 and (not amx or (count <= MANY and weights <= SMALL))


class Int8Tiles:
    """Rows x, each rounded in a unit of its own, to x W^T + b, with W in integers."""

    def __init__(self, integers: Tensor, scales: Tensor, added: Tensor) -> None:
        """W (O, I) in units of the scales (O,), and b (O,), here called `added`."""
        from mtkit.attention.kernels.cpu.machine_code import ZERO
        from mtkit.attention.kernels.cpu.product_tiles import BYTES, laid_out, multiply_bytes

        blocks, surplus = laid_out(integers, BYTES), ZERO * integers.sum(1, dtype=torch.int32)
        self._width, self._outputs = blocks.shape[1] * BYTES.together, len(scales)
        self.weights: Any = tuple(tensor.numpy() for tensor in (blocks, surplus, scales, added))
        """The `product_tiles.ByteWeights`."""
        self._multiply: Callable[..., None] = partial(multiply_bytes, self.weights)

    @classmethod
    def where_possible(cls, integers: Tensor, scales: Tensor, added: Tensor) -> Self | None:
        """The tiles; None if the processor has neither AVX2 nor AVX-512 with VNNI."""
        return cls(integers, scales, added) if has_byte_tiles() else None

    def __call__(
        self, rows: Tensor, out: Tensor | None = None, *, in_units: bool = False
    ) -> tuple[Tensor, NDArray[np.float32]]:
        """Rows (M, I) to the product (M, O), written to `out` if given, and the units (M,) of the rows.

        With `in_units` row m of the product is in units[m], and b is not added.
        """
        count = rows.shape[0]
        rounded, units = np.empty((count, self._width), dtype=np.uint8), np.empty(count, dtype=np.float32)
        out = torch.empty(count, self._outputs) if out is None else out
        self._multiply(rows.float().contiguous().numpy(), in_units, rounded, units, out.numpy())
        return out, units


class Float32Tiles:
    """Rows x to x W^T + b in float32. A row's result does not depend on other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """W (O, I) and b (O,) in float32."""
        from mtkit.attention.kernels.cpu.product_tiles import FLOATS, laid_out, multiply_floats

        self._outputs = len(weight)
        added = torch.zeros(self._outputs) if bias is None else bias.contiguous()
        weights: list[Any] = [tensor.numpy() for tensor in (laid_out(weight, FLOATS), added)]
        self._multiply: Callable[..., None] = partial(multiply_floats, *weights)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows (M, I) to the product (M, O), written to `out` if given."""
        out = torch.empty(rows.shape[0], self._outputs) if out is None else out
        self._multiply(rows.float().contiguous().numpy(), out.numpy())
        return out


class Bfloat16Tiles:
    """Rows x, rounded to bfloat16, to x W^T + b in float32, with W in bfloat16.

    A row's result does not depend on other rows, nor on the number of threads.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """W (O, I) in bfloat16, and b (O,)."""
        from mtkit.attention.kernels.cpu.product_tiles import BFLOAT16, has_amx, laid_out

        # imported only if the processor has the instructions: the import compiles the loop
        if has_amx():
            from mtkit.attention.kernels.cpu.amx_products import INPUTS, multiply_by_amx

            multiply, together = multiply_by_amx, INPUTS
        else:
            from mtkit.attention.kernels.cpu.bfloat16_products import multiply_bfloat16

            multiply, together = multiply_bfloat16, BFLOAT16.together
        self._outputs, inputs = weight.shape
        self._width = -(-inputs // together) * together
        blocks = laid_out(nn.functional.pad(weight, (0, self._width - inputs)), BFLOAT16)
        added = torch.zeros(self._outputs) if bias is None else bias.float()
        weights: list[Any] = [tensor.numpy() for tensor in (blocks.view(torch.int16), added)]
        self._multiply: Callable[..., None] = partial(multiply, *weights)

    @classmethod
    def where_possible(cls, weight: Tensor, bias: Tensor | None) -> Self | None:
        """The tiles; None if the processor does not multiply bfloat16 numbers in registers of 512 bits."""
        from mtkit.attention.kernels.cpu.product_tiles import BFLOAT16, has

        return cls(weight, bias) if has(BFLOAT16) else None

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows (M, I) to the product (M, O), written to `out` if given."""
        count, width = rows.shape
        low = np.empty((count, self._width), dtype=np.int16)
        low[:, width:] = 0
        out = torch.empty(count, self._outputs) if out is None else out
        arrays = rows.float().contiguous().numpy(), low, out.numpy()
        in_ranges(lambda first, last: self._multiply(*(array[first:last] for array in arrays)), count, FEW)
        return out


class Product(Protocol):
    """x (..., I) to x W^T + b (..., O)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def of(self, rows: Tensor) -> "Product":
        """The product with only these rows (K,) of W and b."""


@dataclass(frozen=True)
class Plain:
    """The product in the type of the weights, of rows in that type or under autocast to it."""

    weight: Tensor
    bias: Tensor | None
    wide: bool = False
    """Whether results are float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        product = nn.functional.linear(x, self.weight, self.bias)
        return product.float() if self.wide else product

    def of(self, rows: Tensor) -> "Plain":
        """The product with only these rows (K,) of W and b."""
        return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows])


class Float32:
    """The product in float32 by oneDNN, with weights in its own layout; a row's result does not depend on others."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        rows = x.reshape(-1, x.shape[-1])
        wider = in_few_counts(rows, torch.float32)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(wider, self._packed, self._bias, "none", [], "")
        return product[: rows.shape[0]].view(*x.shape[:-1], self._weight.shape[0])

    def of(self, rows: Tensor) -> "Float32":
        """The product with only these rows (K,) of W and b."""
        return Float32(self._weight[rows], None if self._bias is None else self._bias[rows])


class Tiled:
    """The product in float32 in tiles, or by PyTorch for many rows that threads share."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._plain = Plain(weight.float(), None if bias is None else bias.float())
        self._tiles = Float32Tiles(self._plain.weight, self._plain.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        if not tiles_are_faster(x.numel() // max(x.shape[-1], 1), self._plain.weight.numel()):
            return self._plain(x)
        return in_blocks(self._tiles, x, len(self._plain.weight))

    def of(self, rows: Tensor) -> "Tiled":
        """The product with only these rows (K,) of W and b."""
        some = self._plain.of(rows)
        return Tiled(some.weight, some.bias)


class Low:
    """The product in bfloat16 on the CPU, with float32 in and out; sums are in float32.

    Tiles multiply any number of rows if the processor has them: their results are not rounded, PyTorch's are, and a
    row's result must not depend on the number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.bfloat16(), bias
        self._tiles = Bfloat16Tiles.where_possible(self._weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        return in_blocks(self._multiply if self._tiles is None else self._tiles, x, len(self._weight))

    @cached_property
    def _multiply(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The product of rows (M, I) by PyTorch, whose results are rounded to bfloat16 before they are float32."""
        with torch.inference_mode(False):  # it may be asked for inside, and serves outside as well
            bias = None if self._bias is None else self._bias.bfloat16()
            packed = torch.ops.mkldnn._reorder_linear_weight(self._weight) if has_low_products() else None

        def multiply(rows: Tensor, out: Tensor | None) -> Tensor:
            wider = in_few_counts(rows, torch.bfloat16)
            if packed is None:
                low = nn.functional.linear(wider, self._weight, bias)
            else:
                low = torch.ops.mkldnn._linear_pointwise(wider, packed, bias, "none", [], "")
            low = low[: rows.shape[0]]
            return low.float() if out is None else out.copy_(low)

        return multiply

    def of(self, rows: Tensor) -> "Low":
        """The product with only these rows (K,) of W and b."""
        return Low(self._weight[rows], None if self._bias is None else self._bias[rows])


BLOCK = 1024
"""Most rows multiplied at a time, so that intermediate results stay in the cache between two passes."""

LEAST = 16
"""Row counts are multiples of this: the rows of an AMX tile, which takes as long for fewer."""


def in_blocks(multiply: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, outputs: int) -> Tensor:
    """The product (..., O) of x (..., I) in float32, up to `BLOCK` rows at a time; `outputs` is O.

    `multiply` gets the rows and the memory for their product, so that no further pass joins the parts; None for one
    part.
    """
    *before, width = x.shape
    rows = x.reshape(-1, width)
    if rows.shape[0] <= BLOCK:
        output = multiply(rows, None)
    else:
        output = x.new_empty(rows.shape[0], outputs, dtype=torch.float32)
        for part, out in zip(rows.split(BLOCK), output.split(BLOCK), strict=True):
            multiply(part, out)
    return output.view(*before, outputs)


def few_counts(count: int) -> int:
    """Round a number of rows up to a multiple of an eighth of its power of two.

    oneDNN compiles a kernel for each number of rows that it has not yet seen, which takes as long as dozens of
    products, and a search that drops finished segments has hundreds of numbers.
    """
    step = max(LEAST, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def in_few_counts(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows (M, I) in another type, followed by meaningless rows, `few_counts` of M in total."""
    count, width = rows.shape
    wanted = few_counts(count)
    if count == wanted:
        return rows.to(dtype)
    wider = rows.new_empty(wanted, width, dtype=dtype)
    wider[:count] = rows
    return wider


@cache
def packs_float32() -> bool:
    """Whether oneDNN multiplies faster in float32 than the library that PyTorch's products call.

    On an AMD EPYC with AVX-512, MKL reaches the rate of half as wide units, and oneDNN is 2.3 times as fast.
    """
    capable = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
    return capable and torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"


@cache
def tiles_float32() -> bool:
    """Whether tiles multiply faster in float32 than PyTorch, measured only with AVX2: MKL takes twice as long for
    a few rows, and as long for many."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and has_float_tiles()


@cache
def has_float_tiles() -> bool:
    """Whether the processor has AVX2."""
    from mtkit.attention.kernels.cpu.product_tiles import FLOATS, has

    return has(FLOATS)


def loops_multiply(*tensors: Tensor) -> bool:
    """Whether loops with tiled products replace PyTorch's operations on these: float32 on a CPU, in inference mode.

    Not outside it, because a pass that is run again with gradients must be the same to the last digit.
    """
    return torch.is_inference_mode_enabled() and loops_take(*tensors) and has_float_tiles()


@cache
def has_byte_tiles() -> bool:
    """Whether the processor has AVX2, or AVX-512 with VNNI."""
    from mtkit.attention.kernels.cpu.product_tiles import BYTES, has

    return has(BYTES)


def _vendor() -> str:
    """The processor's vendor, as it names itself; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # other systems than Linux
        return platform.processor().rpartition(", ")[2]
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
