"""Products in tiles against PyTorch's in 64 bits."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from mtkit.attention.kernels.cpu import product_tiles
from mtkit.attention.kernels.cpu.machine_code import ZERO, round_rows
from mtkit.attention.kernels.cpu.product import Float32Tiles, Low, tiles_are_faster

COUNTS = [*range(1, 14), 50]
SHAPES = [(1, 1), (3, 63), (5, 64), (4, 65), (63, 130), (256, 64), (257, 200)]
"""Inputs and outputs."""

LACKING = "this processor has no such instruction"

by_bytes = pytest.mark.skipif(not product_tiles.has(product_tiles.BYTES), reason=LACKING)
by_bfloat16 = pytest.mark.skipif(not product_tiles.has(product_tiles.BFLOAT16), reason=LACKING)
by_amx = pytest.mark.skipif(not product_tiles.has_amx(), reason=LACKING)
by_floats = pytest.mark.skipif(not product_tiles.has(product_tiles.FLOATS), reason=LACKING)


def in_bytes(rows: Tensor, integers: Tensor, scales: Tensor, added: Tensor, *, in_units: bool) -> tuple[Tensor, Tensor]:
    """The product and the units of the rows."""
    from mtkit.attention.kernels.cpu.product_tiles import multiply_bytes

    blocks, surplus = product_tiles.laid_out(integers, product_tiles.BYTES), ZERO * integers.sum(1, dtype=torch.int32)
    whole = torch.randint(0, 256, (len(rows), blocks.shape[1] * 4)).to(torch.uint8)
    units, out = torch.empty(len(rows)), torch.full((len(rows), len(integers)), torch.nan)
    weights = tuple(each.numpy() for each in (blocks, surplus, scales, added))
    call: Callable[..., None] = multiply_bytes
    call(weights, rows.numpy(), in_units, whole.numpy(), units.numpy(), out.numpy())
    return out, units


@pytest.mark.parametrize(
    ("instruction", "size", "together"),
    [
        (product_tiles.VNNI, 64, 4),
        (product_tiles.PAIRS, 16, 4),
        (product_tiles.BFLOAT16, 64, 2),
        (product_tiles.FLOATS, 16, 1),
    ],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (4, 64), (7, 130)])
def test_blocks_hold_each_weight_once(
    instruction: product_tiles.Instruction, size: int, together: int, inputs: int, outputs: int
) -> None:
    weights = torch.arange(1, inputs * outputs + 1).view(outputs, inputs)
    blocks = product_tiles.laid_out(weights, instruction)
    assert blocks.shape == (-(-outputs // size), -(-inputs // together), size, together)
    for o in range(outputs):
        for i in range(inputs):
            assert blocks[o // size, i // together, o % size, i % together] == weights[o, i]
    assert blocks.count_nonzero() == inputs * outputs


@pytest.mark.parametrize("instruction", [product_tiles.VNNI, product_tiles.PAIRS])
@pytest.mark.parametrize("rows", range(1, product_tiles.MOST_ROWS + 1))
def test_bytes_are_multiplied_alike_by_every_instruction(instruction: product_tiles.Instruction, rows: int) -> None:
    """Also by the one that this processor does not take where it has both."""
    if not product_tiles.has(instruction):
        pytest.skip(LACKING)
    write_sums = product_tiles.sums_by(instruction)

    @njit
    def multiply(whole: Any, weights: Any, sums: Any) -> None:
        for block in range(len(weights)):
            write_sums(whole, weights, sums[block], 1, rows, block)

    integers = torch.randint(-63, 64, (130, 44)).to(torch.int8)
    integers[5], whole = 63, torch.randint(0, 256, (rows + 1, 44)).to(torch.uint8)
    whole[1] = 255  # pairs of these and 63 are the largest numbers of 16 bits that there can be
    blocks = product_tiles.laid_out(integers, instruction)
    sums = torch.full((len(blocks), rows, instruction.outputs), 7, dtype=torch.int32)
    multiply(whole.numpy(), blocks.numpy(), sums.numpy())
    found = sums.transpose(0, 1).flatten(1)[:, :130]
    assert torch.equal(found.long(), whole[1:].long() @ integers.long().t())


@by_floats
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_sums_of_float32_are_in_float32(inputs: int, outputs: int) -> None:
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(50, inputs)
    product, whole = Float32Tiles(weight, bias), torch.full((50, outputs), torch.nan)
    assert product(x, whole) is whole
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t() + bias, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(Float32Tiles(weight, None)(x), whole - bias, rtol=1e-6, atol=2e-5)
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count])


@by_floats
def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    x = torch.randn(4, 20)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    found = Float32Tiles(torch.ones(17, 20), None)(x)
    assert found.isfinite().all(1).tolist() == [True, False, False, True]
    assert found[1].eq(torch.inf).all()
    assert found[2].isnan().all()


@by_bytes
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_sums_of_bytes_are_exact(inputs: int, outputs: int) -> None:
    integers = torch.randint(-63, 64, (outputs, inputs)).to(torch.int8)
    scales, added = torch.rand(outputs) + 0.1, torch.randn(outputs)
    for count in COUNTS:
        rows = torch.randn(count, inputs) * torch.logspace(-3, 3, count)[:, None]
        sums, units = in_bytes(rows, integers, scales, added, in_units=True)
        whole, expected_units = torch.empty(count, inputs, dtype=torch.uint8), torch.empty(count)
        round_rows(rows.numpy(), whole.numpy(), expected_units.numpy())
        exact = (whole.long() - ZERO) @ integers.long().t()
        assert torch.equal(units, expected_units)
        assert torch.equal(sums, exact.float() * scales)
        product, _ = in_bytes(rows, integers, scales, added, in_units=False)
        expected = torch.addcmul(added.double(), sums.double(), units.double()[:, None])
        torch.testing.assert_close(product.double(), expected, rtol=1e-6, atol=1e-6)


@by_bytes
def test_the_largest_sums_of_bytes_are_exact() -> None:
    integers = torch.tensor([63, -63]).repeat(4096, 1).t().contiguous().to(torch.int8)
    for sign in (1.0, -1.0):
        sums, _ = in_bytes(torch.full((2, 4096), sign), integers, torch.ones(2), torch.zeros(2), in_units=True)
        assert sums.tolist() == [[sign * 127 * 63 * 4096, -sign * 127 * 63 * 4096]] * 2


def in_bfloat16(rows: Tensor, weights: Tensor, added: Tensor, amx: bool = False) -> tuple[Tensor, Tensor]:
    """The product, and the rounded rows."""
    if amx:
        from mtkit.attention.kernels.cpu.amx_products import INPUTS, multiply_by_amx

        multiply, together = multiply_by_amx, INPUTS
    else:
        from mtkit.attention.kernels.cpu.bfloat16_products import multiply_bfloat16

        multiply, together = multiply_bfloat16, product_tiles.BFLOAT16.together
    width = -(-rows.shape[1] // together) * together
    blocks = product_tiles.laid_out(
        functional.pad(weights.bfloat16(), (0, width - rows.shape[1])), product_tiles.BFLOAT16
    )
    low = torch.zeros(len(rows), width, dtype=torch.bfloat16)
    out = torch.full((len(rows), len(weights)), torch.nan)
    multiply(blocks.view(torch.int16).numpy(), added.numpy(), rows.numpy(), low.view(torch.int16).numpy(), out.numpy())
    return out, low[:, : rows.shape[1]]


@by_bfloat16
@pytest.mark.parametrize("amx", [False, pytest.param(True, marks=by_amx)])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (33, 65), (1024, 64)])
def test_sums_of_bfloat16_are_in_float32(inputs: int, outputs: int, amx: bool) -> None:
    weights, added, whole = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(50, inputs)
    last, _ = in_bfloat16(whole, weights, added, amx)
    for count in [*COUNTS, 16, 17, 32]:
        rows = whole[:count]
        product, low = in_bfloat16(rows, weights, added, amx)
        assert torch.equal(low, rows.bfloat16())
        exact = low.double() @ weights.bfloat16().double().t() + added.double()
        torch.testing.assert_close(product.double(), exact, rtol=1e-6, atol=1e-4)
        assert torch.equal(product, last[:count])


@by_bfloat16
def test_rows_are_rounded_as_pytorch_rounds_them() -> None:
    one = torch.tensor(1.0).view(torch.int32)
    halves = (one + torch.arange(0, 1 << 18, 1 << 14, dtype=torch.int32)).view(torch.float32)
    odd = [0.0, -0.0, 3.4e38, -3.4e38, torch.inf, -torch.inf, 1e-40, 3.4028235e38]
    rows = torch.cat([halves, -halves, torch.tensor(odd)])[None]
    _, low = in_bfloat16(rows, torch.zeros(1, rows.shape[1]), torch.zeros(1))
    assert torch.equal(low.view(torch.int16), rows.bfloat16().view(torch.int16))
    broken = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    product, low = in_bfloat16(torch.stack([broken, torch.ones(3)]), torch.ones(1, 3), torch.zeros(1))
    assert low[0].isnan().all()
    assert product.isnan().squeeze().tolist() == [True, False]


def test_a_processor_that_was_chosen_by_hand_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CPU_NAME", "generic")
    assert not any(
        map(product_tiles.has, (product_tiles.VNNI, product_tiles.PAIRS, product_tiles.BFLOAT16, product_tiles.FLOATS))
    )
    assert not product_tiles.has_amx.__wrapped__()


@by_bytes
@pytest.mark.parametrize("count", [1, 6, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_is_the_same_to_the_bit_with_and_without(count: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtkit.attention.kernels.cpu.int8 import Int8

    product, x = Int8.rounded(torch.randn(100, 34), torch.randn(100) if bias else None), torch.randn(count, 34)
    found = []
    for faster in (True, False):
        monkeypatch.setattr("mtkit.attention.kernels.cpu.int8.tiles_are_faster", lambda *_, faster=faster: faster)
        sums, units, _ = product.in_units(x)
        found.append([each.numpy() for each in (product(x), sums, units)])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


@by_bfloat16
def test_bfloat16_is_nearer_in_tiles() -> None:
    weight, bias, x = torch.randn(100, 34), torch.randn(100), torch.randn(7, 34)
    product, exact = Low(weight, bias), x.bfloat16().double() @ weight.bfloat16().double().t() + bias.double()
    assert (product(x) - exact).abs().max() < 1e-5
    assert 1e-3 < (product._multiply(x, None) - exact).abs().max() < 0.2


@by_bfloat16
@pytest.mark.parametrize("amx", [False, pytest.param(True, marks=by_amx)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_in_bfloat16_does_not_depend_on_how_many_stand_beside_it(
    amx: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_tiles, "has_amx", lambda: amx)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    product, x = Low(torch.randn(70, 1024), torch.randn(70)), torch.randn(100, 1024)
    whole = product(x)
    for count in (1, 2, 15, 16, 17, 33, 64):
        assert torch.equal(product(x[:count]), whole[:count])
    out = torch.empty_like(whole)
    assert product._tiles is not None
    assert product._tiles(x, out) is out
    assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("amx", "threads", "count", "weights", "faster"),
    [
        (True, 1, 16, 8000 * 256, True),
        (True, 2, 16, 8000 * 256, True),
        (True, 1, 17, 8000 * 256, False),
        (True, 1, 256, 1024 * 256, True),
        (True, 1, 257, 256 * 256, False),
        (True, 2, 17, 256 * 256, False),
        (False, 1, 1000, 8000 * 256, True),
        (False, 2, 17, 256 * 256, False),
    ],
)
def test_tiles_multiply_few_rows_and_with_amx_more_with_small_weights(
    amx: bool, threads: int, count: int, weights: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert tiles_are_faster(count, weights) == faster


@pytest.mark.parametrize(("processor", "module"), [("znver4", "bfloat16_products"), ("sapphirerapids", "amx_products")])
def test_bfloat16_products_compile_for_processors_with_and_without_amx(
    tmp_path: Path, processor: str, module: str
) -> None:
    """LLVM ends the process if the processor lacks an instruction of a module that is imported."""
    settings = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", f"import mtkit.attention.kernels.cpu.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode, done.stderr) == (0, "")
