"""Loops of a short depthwise convolution with SiLU: the backward pass, and a step of decoding."""

import numpy as np

from mtkit.attention.kernels.cpu.function_loops import sigmoid
from mtkit.attention.kernels.cpu.machine_code import Floats, compiled

TOGETHER = 256
"""Positions whose gradients of weights are added up by themselves, so that long sums keep their digits."""


@compiled(
    "boolean, float32[:, :, ::1], float32[:, ::1], float32[::1], "
    "float32[:, :, ::1], float32[:, :, ::1], float32[:, ::1], float32[::1], int64, int64"
)
def write_gradients(
    reverse: bool,
    x: Floats,
    weight: Floats,
    bias: Floats,
    d_y: Floats,
    d_x: Floats,
    d_weight: Floats,
    d_bias: Floats,
    first: int,
    last: int,
) -> None:
    """Add the gradients of y = SiLU(bias + sum of weight_i x_{t - i}) to d_x, d_weight and d_bias.

    x, y (B, T, C), weight (taps, C), bias (C,); only channels from `first` to `last` - 1. reverse: x_{t + i} in place
    of x_{t - i}.
    """
    segments, length, _ = d_x.shape
    taps, channels, step = weight.shape[0], last - first, 1 if reverse else -1
    sums, d_taps = np.empty(channels, np.float32), np.zeros((taps + 1, channels), np.float32)
    for b in range(segments):
        for t in range(length):
            some = min(taps, length - t if reverse else t + 1)
            sums[:] = bias[first:last]
            for i in range(some):
                read, of_tap = x[b, t + step * i, first:last], weight[i, first:last]
                for c in range(channels):
                    sums[c] += of_tap[c] * read[c]
            d_outputs, d_ones = d_y[b, t, first:last], d_taps[taps]
            for c in range(channels):
                s = sums[c]
                share = sigmoid(s)
                d = d_outputs[c] * share * (np.float32(1) + s * (np.float32(1) - share))
                sums[c] = d
                d_ones[c] += d
            for i in range(some):
                place = t + step * i
                read, d_read, of_tap, d_tap = (
                    x[b, place, first:last],
                    d_x[b, place, first:last],
                    weight[i, first:last],
                    d_taps[i],
                )
                for c in range(channels):
                    d_read[c] += of_tap[c] * sums[c]
                    d_tap[c] += sums[c] * read[c]
            if t + 1 == length or t % TOGETHER == TOGETHER - 1:
                d_weight[:, first:last] += d_taps[:taps]
                d_bias[first:last] += d_taps[taps]
                d_taps[:] = 0


@compiled("float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32[:, ::1]")
def write_newest(earlier: Floats, newest: Floats, weight: Floats, bias: Floats, out: Floats) -> None:
    """Write SiLU(bias + sum of weight_i x_{t - i}) to out (R, C), for x_t newest (R, C), and forget the first x.

    earlier (R, taps - 1, C) holds the inputs before, and afterwards the inputs up to x_t. weight (taps, C).
    """
    rows, channels = newest.shape
    lags = earlier.shape[1]
    for r in range(rows):
        x, y, past = newest[r], out[r], earlier[r]
        for c in range(channels):
            y[c] = bias[c] + weight[0, c] * x[c]
        for i in range(lags):
            row, of_tap = past[i], weight[lags - i]
            for c in range(channels):
                y[c] += of_tap[c] * row[c]
        for i in range(lags - 1):
            past[i] = past[i + 1]
        if lags > 0:
            past[lags - 1] = x
        for c in range(channels):
            y[c] *= sigmoid(y[c])
