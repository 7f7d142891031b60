"""Measures this machine's matrix product rate in each arithmetic, and checks whether it is busy.

Operations that training and decoding require, counted segment by segment to exclude padding.

They are counted in the model's own forward pass and steps, whatever a program does to be faster. A multiplication with
its addition counts as two. A backward pass takes twice the operations of its forward pass.
"""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from mtkit.attention import State
from mtkit.attention.kernels.cpu.product import Float32, packs_float32
from mtkit.benchmark.attention_work import seconds_of
from mtkit.data.batches import make_batch
from mtkit.data.prepared import Side
from mtkit.model.network import Network
from mtkit.text.tokenizer import BOS
from mtkit.training.data_loader import evenly_spaced
from mtkit.training.flops import flops_of

ARITHMETICS = {
    "float32": torch.float32,
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch recommends another int8 package
            return Rate(arithmetic, {side: _rate(side, ARITHMETICS[arithmetic], device) for side in sides})
    except RuntimeError:
        return None


def busy_note(threads: int, *, samples: int = 9, seconds: float = 0.3) -> str | None:
    """Return a warning if other processes leave fewer than `threads` cores; None if they do not, or if unknown.

    Running tasks are counted `samples` times within `seconds`; tasks that wait for files or terminals do not count.
    """
    counts = []
    for _ in range(samples):
        try:
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
        except OSError:  # not Linux
            return None
        counts.append(int(running) - 1)  # without this process, which runs as it reads
        time.sleep(seconds / samples)
    others, cores = round(median(counts)), os.cpu_count() or 1
    if others < 1 or others + threads <= cores:
        return None
    return f"other processes keep {others} of {cores} cores busy, and this one uses {threads}: speeds are too low"


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


SAMPLE = 24
"""Number of segments that are counted, of all lengths."""


@torch.no_grad()
def training_operations(model: Network, side: Side, rows: np.ndarray) -> float:
    """Return the mean forward and backward operations per target token, over a sample of these rows."""
    training, device = model.training, model.output_weight.device
    model.eval()
    operations, tokens = 0, 0
    for row in evenly_spaced(rows[np.argsort(side.target.lengths[rows], kind="stable")].tolist(), SAMPLE):
        batch = make_batch(side, np.array([row]))
        source, target_in = batch.source.to(device), batch.target_in.to(device)
        task = None if batch.task is None else batch.task.to(device)
        forward = partial(_forward, model, source, target_in, task)
        operations += 3 * flops_of(forward)
        tokens += batch.target_tokens
    model.train(training)
    return operations / tokens


@torch.no_grad()
def decoding_operations(model: Network, segments: Sequence[tuple[int, int]], beam: int) -> float:
    """Return the mean operations of decoding a segment, over a sample of `segments` (source pieces, target pieces).

    Each source is encoded once. One hypothesis takes the first step; `beam` hypotheses take one step for each further
    piece of the translation.
    """
    device, chosen = model.output_weight.device, evenly_spaced(sorted(segments, key=sum), SAMPLE)
    return sum(_decode(model, *lengths, beam, device) for lengths in chosen) / len(chosen)


def _forward(model: Network, source: Tensor, target_in: Tensor, task: Tensor | None) -> Tensor:
    return model(source, target_in, task=task).hidden @ model.output_weight.t()


def _decode(model: Network, source: int, target: int, beam: int, device: torch.device) -> float:
    """Count the first and last step; assume linear growth between them, and in the number of hypotheses."""
    pieces = torch.full((1, source), BOS, device=device)
    token = torch.full((1, 1), BOS, device=device)  # with several tokens, attention may mask more than it needs
    state: State = {}

    def start() -> None:
        nonlocal state
        state = model.start(model.encode(pieces))

    def step() -> None:
        nonlocal state
        logits, state, _ = model.step(token, state)
        logits.whole()

    begin, first = flops_of(start), flops_of(step)
    for _ in range(target - 2):
        step()
    last = flops_of(step) if target > 1 else first
    return begin + first + beam * (target * (first + last) / 2 - first) if target else begin
