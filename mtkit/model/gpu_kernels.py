# mypy: ignore-errors
"""Kernels for training on a GPU, in Triton, which PyTorch brings along for CUDA; `gpu_layers` imports and calls them.

All compute in float32. A program takes tiles of ROWS rows of a matrix (N, WIDTH). Programs that add up columns store
sums of their own, which are added in a fixed order: results are the same in each run.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """The bits of unsigned integers, mixed: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, at, DROPPED: tl.constexpr):
    """Whether dropout keeps the numbers at these places; it drops DROPPED of 2**24.

    Each half of the seed is mixed in: with only one half, two seeds would give one mask, shifted.
    """
    number = tl.load(seed)
    low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    return (_mixed(_mixed(at.to(tl.uint32) + low) ^ high) >> 8).to(tl.int32) >= DROPPED


@triton.jit
def _normed(
    x, branch, shift, at, real, column, kept, eps, WIDTH: tl.constexpr, SCALE: tl.constexpr, SHIFTED: tl.constexpr
):
    """Rows s of x + what is kept of branch, as (s - mean) / deviation, zero outside; and 1 / deviation."""
    within = column < WIDTH
    added = tl.load(branch + at, real, 0.0).to(tl.float32)
    if SHIFTED:
        added += tl.load(shift + column, within, 0.0).to(tl.float32)[None, :]
    total = tl.load(x + at, real, 0.0).to(tl.float32) + tl.where(kept, added * SCALE, 0.0)
    mean = tl.sum(total, 1) / WIDTH
    centred = tl.where(within[None, :], total - mean[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    return centred * factor[:, None], factor


@triton.jit(do_not_specialize=["rows"])
def add_and_norm(
    x,
    branch,
    shift,
    weight,
    bias,
    seed,
    out,
    rows,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DROPPED: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """out = LN(x + dropout(branch + shift)), one tile in a program."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    within = column < WIDTH
    real = (row < rows)[:, None] & within[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    undropped = real
    if DROPPED > 0:
        undropped = _kept(seed, at, DROPPED)
    normed, _ = _normed(x, branch, shift, at, real, column, undropped, eps, WIDTH, SCALE, SHIFTED)
    w = tl.load(weight + column, within, 0.0).to(tl.float32)[None, :]
    b = tl.load(bias + column, within, 0.0).to(tl.float32)[None, :]
    tl.store(out + at, normed * w + b, real)


@triton.jit(do_not_specialize=["rows"])
def add_and_norm_backward(
    x,
    branch,
    shift,
    weight,
    seed,
    upstream,
    d_x,
    d_branch,
    sums,
    rows,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DROPPED: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """The gradients of x and branch, and sums (programs, 2 or 3, WIDTH) for the gradients of weight, bias, shift."""
    column = tl.arange(0, COLUMNS)
    within = column < WIDTH
    w = tl.load(weight + column, within, 0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    d_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    d_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        real = (row < rows)[:, None] & within[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        undropped = real
        if DROPPED > 0:
            undropped = _kept(seed, at, DROPPED)
        normed, factor = _normed(x, branch, shift, at, real, column, undropped, eps, WIDTH, SCALE, SHIFTED)
        d_normed = tl.load(upstream + at, real, 0.0).to(tl.float32)
        d_weight += d_normed * normed
        d_bias += d_normed
        d_normed *= w
        along = tl.sum(d_normed * normed, 1) / WIDTH
        mean = tl.sum(d_normed, 1) / WIDTH
        gradient = (d_normed - mean[:, None] - normed * along[:, None]) * factor[:, None]
        tl.store(d_x + at, gradient, real)
        if DROPPED > 0:
            gradient = tl.where(undropped, gradient * SCALE, 0.0)
            tl.store(d_branch + at, gradient, real)
        if SHIFTED:
            d_shift += tl.where(real, gradient, 0.0)
    program_sums = sums + tl.program_id(0) * (2 + SHIFTED) * WIDTH + column
    tl.store(program_sums, tl.sum(d_weight, 0), within)
    tl.store(program_sums + WIDTH, tl.sum(d_bias, 0), within)
    if SHIFTED:
        tl.store(program_sums + 2 * WIDTH, tl.sum(d_shift, 0), within)


@triton.jit(do_not_specialize=["rows"])
def relu_backward(
    upstream, result, gradient, sums, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """gradient = upstream where result > 0, else 0, and its sums (programs, WIDTH), COLUMNS of them in a program."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        real = (row < rows)[:, None] & within[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        passes = tl.load(result + at, real, 0.0).to(tl.float32) > 0
        passed = tl.where(passes, tl.load(upstream + at, real, 0.0).to(tl.float32), 0.0)
        tl.store(gradient + at, passed, real)
        total += passed
    tl.store(sums + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), within)


@triton.jit
def cross_entropy(logits, target, smoothed, nll, smoothing, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The smoothed and the plain loss of a row of logits, which is replaced by its gradient; a row in a program.

    Each lane keeps the highest of its logits and their sum in units of it, so that lanes meet once.
    """
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    row_logits = logits + row.to(tl.int64) * WIDTH
    gold = tl.load(target + row)
    gold_logit = tl.load(row_logits + gold).to(tl.float32)
    peak = tl.full([COLUMNS], -1e30, tl.float32)
    mass = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        real = first + column < WIDTH
        x = tl.load(row_logits + first + column, real, -1e30).to(tl.float32)
        higher = tl.maximum(peak, x)
        mass = mass * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
        total += tl.where(real, x, 0.0)
    top = tl.max(peak, 0)
    log_sum = top + tl.log(tl.sum(mass * tl.exp(peak - top), 0))
    loss = log_sum - gold_logit
    tl.store(nll + row, loss)
    tl.store(smoothed + row, loss + smoothing * (gold_logit - tl.sum(total, 0) / WIDTH))
    for first in range(0, WIDTH, COLUMNS):
        place = first + column
        error = tl.exp(tl.load(row_logits + place, place < WIDTH, -1e30).to(tl.float32) - log_sum) - smoothing / WIDTH
        tl.store(row_logits + place, tl.where(place == gold, error - (1.0 - smoothing), error), place < WIDTH)
