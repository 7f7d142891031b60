"""Measures a device's rate of matrix products in each arithmetic."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mtkit.attention.kernels.cpu.product import Float32, packs_float32
from mtkit.device import seconds_of, tf32_products

ARITHMETICS = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}

LARGE = {"cpu": 2048, "cuda": 8192}
"""Side of a square product measured in addition to the model's sizes: large enough for the full rate."""

BLOCKS = 5
BLOCK_SECONDS = 0.05
"""Products are timed in this many blocks of about this length; the fastest block counts."""


@dataclass(frozen=True)
class Rate:
    """Operations a second of square matrix products, two for a multiplication with its addition."""

    arithmetic: str
    by_size: dict[int, float]
    """{side of the squares: operations per second}."""

    @property
    def best(self) -> float:
        """Highest measured rate: the bound for a computation that consists only of products."""
        return max(self.by_size.values())


def arithmetic_of(name: str) -> str:
    """Return the arithmetic that a precision's name begins with; float32 if it begins with none."""
    return next((arithmetic for arithmetic in ARITHMETICS if name.startswith(arithmetic)), "float32")


def product_rate(arithmetic: str, device: torch.device, sizes: Sequence[int]) -> Rate | None:
    """Measure products of these sides and of side LARGE; return None if the machine does not support the arithmetic.

    Both matrices are read along their rows, as a linear layer reads its input and its weights.
    """
    sides = sorted({*sizes, LARGE.get(device.type, LARGE["cpu"])})
    try:
        with warnings.catch_warnings(), tf32_products(arithmetic == "tf32"):
            warnings.simplefilter("ignore")  # PyTorch recommends another int8 package
            return Rate(arithmetic, {side: _rate(side, ARITHMETICS[arithmetic], device) for side in sides})
    except RuntimeError:
        return None


def _rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    multiply = _product(side, dtype, device)

    def repeat(times: int) -> float:
        def products() -> None:
            for _ in range(times):
                multiply()

        return seconds_of(products, device)

    repeat(1)  # kernels are chosen at the first call
    seconds = max(repeat(1), 1e-9)
    if seconds > BLOCKS * BLOCK_SECONDS:  # an emulated arithmetic: one measurement is enough
        return 2.0 * side**3 / seconds
    times = max(1, min(1000, round(BLOCK_SECONDS / seconds)))
    return 2.0 * side**3 * times / min(repeat(times) for _ in range(BLOCKS))


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    if dtype == torch.int8:
        return _int8_product(side, device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float32 and device.type == "cpu" and packs_float32():
        packed = Float32(right, None)
        return lambda: packed(left)
    return lambda: left @ right.t()


def _int8_product(side: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return an int8 product; on the CPU as in a linear layer: float32 in, quantised to int8, float32 out."""
    if device.type == "cpu":
        scaled = torch.quantize_per_tensor(torch.randn(side, side), 0.05, 0, torch.qint8)
        weight, inputs = torch.ops.quantized.linear_prepack(scaled, None), torch.randn(side, side)
        return lambda: torch.ops.quantized.linear_dynamic(inputs, weight, True)
    left, right = (torch.randint(-127, 127, (side, side), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(left, right.t())
