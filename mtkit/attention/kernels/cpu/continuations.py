"""The best continuations of hypotheses, from the logits of their next pieces."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, bits_of, compiled, exponential, of_bits, part

BLOCK = 64
"""Logits of which the largest is noted; those of a block with none large enough are not looked at again."""


LEAST = np.int32(-(2**31))
"""Of whole numbers."""


@part
def ordered(bits: np.int32) -> np.int32:
    """The bits of a float32 as whole numbers in the order of the floats, or the other way round.

    Their largest is found by vector units, which that of floats is not, because of NaN.
    """
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@part
def write_largest(sums: Floats, unit: np.float32, added: Floats, high: Floats) -> None:
    """Writes the largest logit of each block; NaN, with whatever sign, counts as the largest or as the least."""
    whole = len(sums) // BLOCK
    for block in range(whole):
        some = sums[block * BLOCK : block * BLOCK + BLOCK]  # its places are seen not to count from the end
        own = added[block * BLOCK : block * BLOCK + BLOCK]
        largest = LEAST
        for j in range(BLOCK):  # a loop of a length that is known is vectorised whole
            largest = max(largest, ordered(bits_of(some[j] * unit + own[j])))
        high[block] = of_bits(ordered(largest))
    if whole < len(high):
        largest = LEAST
        for j in range(whole * BLOCK, len(sums)):
            largest = max(largest, ordered(bits_of(sums[j] * unit + added[j])))
        high[whole] = of_bits(ordered(largest))


@compiled(
    "float32[:, :, ::1], float32[:, ::1], float32[::1], float32[:, ::1], boolean[::1], int64, int64, float32[:, ::1], "
    "int64[:, ::1]"
)
def best_of_logits(
    sums: Floats,
    units: Floats,
    added: Floats,
    before: Floats,
    ends: NDArray[np.bool_],
    first: int,
    end: int,
    top: Floats,
    index: NDArray[np.int64],
) -> None:
    """Writes the k largest of log-probability plus `before` (B, N) to top (B, k), largest first.

    Log-probabilities (B, N, V) are logits less the logarithm of the sum of their exponentials over all V, and logits
    are sums (B, N, V) times units (B, N) plus what is added (V,). Pieces below `first` may not come, and where segments
    `ends` (B,), none but `end`. index (B, k) gets the places of what is found among N * V, of equal ones that of the
    first. Hypotheses with NaN have none; where there are too few, top is -inf and the place 0.
    """
    segments, hypotheses, count = sums.shape
    most = top.shape[1]
    high = np.empty((count + BLOCK - 1) // BLOCK, np.float32)
    top[:] = -np.inf
    index[:] = 0
    for row in range(segments * hypotheses):
        b, n = row // hypotheses, row % hypotheses
        of_row, unit = sums[b, n], units[b, n]
        write_largest(of_row, unit, added, high)
        largest_of_all, total = high.max(), np.float32(0)
        for j in range(count):
            total += exponential(of_row[j] * unit + added[j] - largest_of_all)
        less = before[b, n] - (largest_of_all + np.log(total))
        for block in range(len(high)):
            if not high[block] + less > top[b, most - 1]:
                continue
            low, past = max(block * BLOCK, first), min((block + 1) * BLOCK, count)
            for j in range(low, past):
                found = of_row[j] * unit + added[j] + less
                if found > top[b, most - 1] and (j == end or not ends[b]):
                    place = most - 1
                    while place > 0 and top[b, place - 1] < found:
                        top[b, place], index[b, place] = top[b, place - 1], index[b, place - 1]
                        place -= 1
                    top[b, place], index[b, place] = found, n * count + j
