"""The choice of edges by an LSTM (`mtkit.attention.content._edge_predictor`) in one pass, block of sources by block."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtkit.attention.kernels.cached_rows import rows_of
from mtkit.attention.kernels.cpu.decoding_loops import STEPS, TOGETHER, Steps
from mtkit.attention.kernels.cpu.function_loops import sigmoid, tangent
from mtkit.attention.kernels.cpu.machine_code import Floats, compiled, part
from mtkit.attention.kernels.cpu.product_tiles import FLOATS, each_laid_out, write_products
from mtkit.attention.kernels.cpu.row_products import write_four_products
from mtkit.attention.kernels.cpu.threads import in_ranges

LOWEST = np.finfo(np.float32).min

ROWS = 48
"""Sources of a block."""


@part
def update(gates: Floats, inputs: Floats, hidden: Floats, cell: Floats) -> None:
    """Apply one step of the LSTM to hidden and cell (E,), by the sums of gates and inputs (4 E,)."""
    width = len(cell)
    for gate in range(4 * width):
        gates[gate] += inputs[gate]
    taken, kept, shown, new = gates[:width], gates[width : 2 * width], gates[2 * width : 3 * width], gates[3 * width :]
    for e in range(width):
        cell[e] = sigmoid(kept[e]) * cell[e] + sigmoid(taken[e]) * tangent(new[e])
        hidden[e] = sigmoid(shown[e]) * tangent(cell[e])


@compiled(
    f"float32[:, :, :, ::1], float32[:, ::1], {STEPS}, float32[:, ::1], {STEPS}, float32[:, :, :, :, ::1], "
    "float32[:, :, :, ::1], int64[:, :, :, ::1], int64, int64"
)
def write_best(
    opened: Floats,
    keys: Floats,
    key_steps: Steps,
    inputs: Floats,
    input_steps: Steps,
    weights: NDArray[np.float32],
    bias: Floats,
    targets: NDArray[np.int64],
    begin: int,
    end: int,
) -> None:
    """Write the targets (B, G, C, edges) of sources `begin` to `end` - 1 of the B C, best first.

    The LSTM starts at opened (B, G, C, E); its weights are as `each_laid_out`. Rows of keys and inputs are in matrices,
    `steps` apart for the next of B, 1, G and S. A score is a product with a key plus the bias (B, G, C, S), which is
    overwritten; of equal scores the first is the best, and NaN before all others.
    """
    _, graphs, sources, count = bias.shape
    width, edges = opened.shape[3], targets.shape[3]
    hidden, cell = np.empty((ROWS, width), np.float32), np.empty((ROWS, width), np.float32)
    gates, nothing = np.empty((ROWS, 4 * width), np.float32), np.zeros(4 * width, np.float32)
    scores = np.empty(count + TOGETHER, np.float32)
    for first in range(begin, end, ROWS):
        rows = min(ROWS, end - first)
        for g in range(graphs):
            for r in range(rows):
                hidden[r] = opened[(first + r) // sources, g, (first + r) % sources]
                cell[r] = 0
            for draw in range(edges):
                if draw > 0:
                    write_products(hidden[:rows], weights[g], nothing, gates[:rows])
                for r in range(rows):
                    b, c = (first + r) // sources, (first + r) % sources
                    if draw > 0:
                        place = b * input_steps[0] + g * input_steps[2] + targets[b, g, c, draw - 1] * input_steps[3]
                        update(gates[r], inputs[place], hidden[r], cell[r])
                    at, step, last = b * key_steps[0] + g * key_steps[2], key_steps[3], count - 1
                    for j in range(0, count, TOGETHER):
                        two, three, four = min(j + 1, last), min(j + 2, last), min(j + 3, last)
                        some = at + j * step, at + two * step, at + three * step, at + four * step
                        write_four_products(hidden[r], keys, some[0], some[1], some[2], some[3], scores, j)
                    best, added = 0, bias[b, g, c]
                    for j in range(count):
                        scores[j] += added[j]
                        if scores[j] > scores[best] or (np.isnan(scores[j]) and not np.isnan(scores[best])):
                            best = j
                    targets[b, g, c, draw] = best
                    added[best] = LOWEST


def laid_out_recurrent(recurrent: Tensor) -> NDArray[np.float32]:
    """The LSTM's weights (G, E, 4 E) in the form of `best_edges`."""
    array: NDArray[np.float32] = each_laid_out(recurrent.detach().mT, FLOATS).numpy()
    return array


def best_edges(
    opened: Tensor, keys: Tensor, inputs: Tensor, weights: NDArray[np.float32], bias: Tensor, edges: int
) -> Tensor:
    """The targets (B, G, C, edges) of sources (B, G, C, E), best first; all in float32 on the CPU.

    keys (B, G, S, E), inputs (B, G, S, 4 E), weights of `laid_out_recurrent`, bias (B, G, C, S), which is overwritten.
    """
    targets = torch.empty(*opened.shape[:3], edges, dtype=torch.long)
    rows = *rows_of(keys.unsqueeze(1)), *rows_of(inputs.unsqueeze(1))
    arrays = opened.contiguous().numpy(), *rows, weights, bias.numpy(), targets.numpy()
    in_ranges(lambda first, last: write_best(*arrays, first, last), opened.shape[0] * opened.shape[2])
    return targets
