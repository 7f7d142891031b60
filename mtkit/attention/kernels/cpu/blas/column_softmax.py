"""Softmax over the rows of a small matrix of scores (keys, queries), and its gradient.

Each query is a column: the scores of `TOGETHER` queries stay in the processor's second cache, and a softmax over keys
takes no sum across a vector register.
"""

import numpy as np

from mtkit.attention.kernels.cpu.machine_code import Floats, exponential, part

TOGETHER = 64
"""Queries, and keys, of a product."""
FAR, LEAST = np.float32(-1e30), np.float32(-5e29)
"""Score of a hidden key, and a lower bound of others."""


@part
def shown(score: np.float32, log_sum: np.float32) -> np.float32:
    """Return exp(score - log_sum), exactly 0 for a hidden key, which must not change any gradient."""
    weight = exponential(score - log_sum)
    return weight if score > LEAST else np.float32(0)


@part
def write_weights(scores: Floats, count: int, log_sum: Floats) -> None:
    """Replace scores (keys, queries) by the softmax over keys, zero without a key, and write its log-sum-exp."""
    queries = scores.shape[1]
    top, total = np.full(queries, FAR, np.float32), np.zeros(queries, np.float32)
    for p in range(count):
        row = scores[p]
        for i in range(queries):
            top[i] = max(top[i], row[i])
    for p in range(count):
        row = scores[p]
        for i in range(queries):
            row[i] = shown(row[i], top[i])
            total[i] += row[i]
    for i in range(queries):
        seen = top[i] > LEAST
        log_sum[i, 0] = top[i] + np.log(total[i]) if seen else -FAR
        total[i] = np.float32(1) / total[i] if seen else np.float32(0)
    for p in range(count):
        row = scores[p]
        for i in range(queries):
            row[i] *= total[i]


@part
def replace_scores(scores: Floats, count: int, log_sum: Floats) -> None:
    """Replace scores by weights, from the log-sum-exp of each query."""
    for p in range(count):
        row = scores[p]
        for i in range(len(row)):
            row[i] = shown(row[i], log_sum[i, 0])


@part
def write_means(outputs: Floats, d_outputs: Floats, mean: Floats) -> None:
    """Write the dot products of output rows with their gradients; they are means of the weights' gradients."""
    for i in range(len(mean)):
        total = np.float32(0)
        for j in range(outputs.shape[1]):
            total += outputs[i, j] * d_outputs[i, j]
        mean[i] = total


@part
def replace_d_weights(d_weights: Floats, weights: Floats, mean: Floats) -> None:
    """Replace the gradients of weights (keys, queries) by the gradients of scores."""
    for p in range(len(weights)):
        d_row, row = d_weights[p], weights[p]
        for i in range(len(row)):
            d_row[i] = (d_row[i] - mean[i]) * row[i]
