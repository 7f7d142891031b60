"""Loop of a choice: the largest numbers of each row."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, compiled


@compiled("float32[:, ::1], int64[:, ::1]", in_any_order=False)
def write_largest(scores: Floats, numbers: NDArray[np.int64]) -> None:
    """Write the columns of the largest scores of each row, the largest first, of equal ones the lower column.

    The number of columns stands for a score of minus infinity, and for NaN.
    """
    count = numbers.shape[1]
    best = np.empty(count, np.float32)
    for row in range(scores.shape[0]):
        some, chosen = scores[row], numbers[row]
        best[:] = -np.inf
        chosen[:] = scores.shape[1]
        least = -np.float32(np.inf)
        for column in range(scores.shape[1]):
            score = some[column]
            if score > least:
                place = count - 1
                while place > 0 and score > best[place - 1]:
                    best[place], chosen[place] = best[place - 1], chosen[place - 1]
                    place -= 1
                best[place], chosen[place] = score, column
                least = best[count - 1]
