"""Loops of a decoding step: softmax of a few queries over cached rows, and the best continuations of hypotheses."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import (
    Floats,
    LowFloats,
    ask_for,
    bits_of,
    compiled,
    exponential,
    of_bits,
    part,
)
from mtkit.attention.kernels.cpu.row_products import COLUMNS, write_four_products, write_weighted_sum

Places = NDArray[np.int64]
Steps = tuple[int, int, int, int]

WEIGHTS = 32
"""Weights computed at a time: a loop of known length is vectorised completely."""

TOGETHER = 4
"""Rows multiplied at a time, with separate sums, so that no addition waits for another; scores after the last row of a
query are meaningless."""


@part
def listed(seen: NDArray[np.bool_], place: Places) -> int:
    """Write the places that are seen, then repeats of the first; returns their number."""
    count = 0
    for j in range(len(seen)):
        place[count] = j
        count += int(seen[j])
    place[count : count + TOGETHER - 1] = place[0]
    return count


LEAST = np.int32(-(2**31))
"""Least 32-bit integer."""


@part
def ordered(bits: np.int32) -> np.int32:
    """Map the bits of a float32 to integers in the order of the floats, or back.

    Vector units find the largest integer; because of NaN they do not find the largest float.
    """
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@part
def write_exponentials(scores: Floats, count: int) -> np.float32:
    """Replace scores by their exponentials relative to the largest, those after `count` by nearly 0; returns the sum.

    The sum is NaN if the softmax is: with NaN or infinity among the scores, or only minus infinity.
    """
    most, together, total = LEAST, np.float32(0), np.float32(0)
    for c in range(count):
        most = max(most, ordered(bits_of(scores[c])))
        together += scores[c]
    largest = of_bits(ordered(most))
    if count > 0 and not (together < np.inf and largest > -np.inf):
        return np.float32(np.nan)
    scores[count : -(-count // WEIGHTS) * WEIGHTS] = -np.inf
    for block in range(0, count, WEIGHTS):
        some = scores[block : block + WEIGHTS]  # its places are seen not to count from the end, which would be a branch
        for c in range(WEIGHTS):
            some[c] = exponential(some[c] - largest)
            total += some[c]
    return max(total, np.float32(1))  # the largest alone adds 1; only a sum of nothing is below


def _attended(
    queries: Floats,
    query_steps: Steps,
    keys: Floats | LowFloats,
    key_steps: Steps,
    values: Floats | LowFloats,
    value_steps: Steps,
    key_groups: int,
    value_groups: int,
    seen: NDArray[np.bool_],
    scale: np.float32,
    factors: Floats,
    out: Floats,
) -> None:
    """Write the outputs (B, N, H, V) of queries, keys and values, whose rows are in matrices (R, K) and (R', V).

    `steps` are the distances in rows to the next of B, N, G and L; the groups G divide H. seen (B, N, H, L). A query
    reads only the rows that it sees; one that sees none gets zero. Keys and values are both in float32 or both in
    bfloat16. Weights are the softmax of scores, or with factors (B, N, H, L) scores times factors; empty: no factors.
    """
    batch, hypotheses, heads, length = seen.shape
    room = -(-length // WEIGHTS) * WEIGHTS
    place, weight = np.empty(room, np.int64), np.empty(room, np.float32)
    query, total = np.empty(queries.shape[1], np.float32), np.empty(out.shape[3], np.float32)
    same_in_all_heads = seen.strides[2] == 0
    for row in range(batch * hypotheses):
        b, n = row // hypotheses, row % hypotheses
        count = 0
        for h in range(heads):
            if h == 0 or not same_in_all_heads:
                count = listed(seen[b, n, h], place)
            asks = queries[b * query_steps[0] + n * query_steps[1] + h * query_steps[2]]
            for k in range(len(query)):
                query[k] = asks[k] * scale
            first = b * key_steps[0] + n * key_steps[1] + h * key_groups // heads * key_steps[2]
            below = b * value_steps[0] + n * value_steps[1] + h * value_groups // heads * value_steps[2]
            after = first + key_steps[2]  # the next head, in most layouts
            for c in range(0, count, TOGETHER):
                one, two = first + place[c] * key_steps[3], first + place[c + 1] * key_steps[3]
                three, four = first + place[c + 2] * key_steps[3], first + place[c + 3] * key_steps[3]
                write_four_products(query, keys, one, two, three, four, weight, c)
                if n == 0:  # the segment's other hypotheses find the rows in the cache
                    for r in range(c, c + TOGETHER):  # a few at a time, because the processor waits for more
                        ask_for(values, below + place[r] * value_steps[3])
                        ask_for(keys, after + place[r] * key_steps[3])
            normaliser = np.float32(1)
            if factors.size == 0:
                normaliser = write_exponentials(weight, count)
            else:
                for c in range(count):
                    weight[c] *= factors[b, n, h, place[c]]
            for column in range(0, len(total), COLUMNS):
                write_weighted_sum(weight, values, below, value_steps[3], place, count, total, column)
            for v in range(len(total)):
                out[b, n, h, v] = total[v] / normaliser


write_attended = part(_attended)

STEPS = "UniTuple(int64, 4)"

attend_rows = compiled(
    *(
        f"float32[:, ::1], {STEPS}, {rows}[:, ::1], {STEPS}, {rows}[:, ::1], {STEPS}, int64, int64, "
        "boolean[:, :, :, :], float32, float32[:, :, :, :], float32[:, :, :, ::1]"
        for rows in ("float32", "int16")
    )
)(_attended)
"""`write_attended` for a caller in Python."""


@compiled("int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1]")
def settle(parents: Places, place: Places, rank: Places, moves: Places, count: Places) -> None:
    """Replace the places (B, N) of hypotheses by the places of their children, given parents (B, N), all by rank.

    The first child stays in its parent's place; another one gets a place that no parent has. Writes the rank (B, N) of
    the child in each place, the copies that this takes, from moves[0] to moves[1], counted over (B, N), and their
    number.
    """
    segments, hypotheses = place.shape
    old_place = np.empty(hypotheses, np.int64)
    count[0] = 0
    for b in range(segments):
        for n in range(hypotheses):
            old_place[n] = place[b, n]
            rank[b, n] = -1
        for n in range(hypotheses):
            parent_place = old_place[parents[b, n]]
            place[b, n] = parent_place
            if rank[b, parent_place] < 0:
                rank[b, parent_place] = n
        free = 0
        for n in range(hypotheses):
            parent_place = place[b, n]
            if rank[b, parent_place] != n:
                while rank[b, free] >= 0:
                    free += 1
                rank[b, free], place[b, n] = n, free
                moves[0, count[0]], moves[1, count[0]] = b * hypotheses + parent_place, b * hypotheses + free
                count[0] += 1


LOGITS = 64
"""Logits per block: a block whose largest logit is too small is not read again."""


@part
def write_largest(sums: Floats, unit: np.float32, added: Floats, high: Floats) -> None:
    """Write the largest logit of each block; NaN counts as the largest or the least, by its sign."""
    full_blocks = len(sums) // LOGITS
    for block in range(full_blocks):
        some = sums[block * LOGITS : block * LOGITS + LOGITS]  # its places are seen not to count from the end
        block_bias = added[block * LOGITS : block * LOGITS + LOGITS]
        largest = LEAST
        for j in range(LOGITS):  # a loop of a length that is known is vectorised whole
            largest = max(largest, ordered(bits_of(some[j] * unit + block_bias[j])))
        high[block] = of_bits(ordered(largest))
    if full_blocks < len(high):
        largest = LEAST
        for j in range(full_blocks * LOGITS, len(sums)):
            largest = max(largest, ordered(bits_of(sums[j] * unit + added[j])))
        high[full_blocks] = of_bits(ordered(largest))


@part
def largest_of(numbers: Floats) -> np.float32:
    """The largest number, NaN if there is one; NumPy's function here takes 0.1 s more to load from the cache."""
    largest = numbers[0]
    for number in numbers:
        if number > largest or np.isnan(number):
            largest = number
    return largest


@compiled(
    "float32[:, :, ::1], float32[:, ::1], float32[::1], float32[:, ::1], int64[:, ::1], boolean[:, ::1], int64, "
    "float32[:, ::1], int64[:, ::1], boolean[:, ::1]"
)
def best_of_logits(
    sums: Floats,
    units: Floats,
    added: Floats,
    before: Floats,
    ending: NDArray[np.int64],
    must: NDArray[np.bool_],
    first: int,
    top: Floats,
    index: NDArray[np.int64],
    doubt: NDArray[np.bool_],
) -> None:
    """Write the k largest of log-probability plus `before` (B, N) to top (B, k), largest first.

    Log-probabilities (B, N, V) are logits less the logarithm of the sum of their exponentials over all V, and logits
    are sums (B, N, V) times units (B, N) plus what is added (V,). Excluded are pieces below `first`, which is EOS; of
    EOS and the break after it all but the piece `ending` (B, N), unless that is -1; and all others for a hypothesis
    that `must` (B, N) end, with -1 by EOS. index (B, k) gets their places among N * V; of equal ones the first counts.
    Hypotheses with NaN have none; if there are too few, top is -inf and the place 0. doubt (B, N) is whether of EOS and
    the break the other one than `ending` has the larger logit.
    """
    segments, hypotheses, count = sums.shape
    most = top.shape[1]
    high = np.empty((count + LOGITS - 1) // LOGITS, np.float32)
    top[:] = -np.inf
    index[:] = 0
    for row in range(segments * hypotheses):
        b, n = row // hypotheses, row % hypotheses
        of_row, unit = sums[b, n], units[b, n]
        write_largest(of_row, unit, added, high)
        largest_of_all, total = largest_of(high), np.float32(0)
        for j in range(count):
            total += exponential(of_row[j] * unit + added[j] - largest_of_all)
        less = before[b, n] - (largest_of_all + np.log(total))
        wanted = first if ending[b, n] < 0 else ending[b, n]
        if count > first + 1:
            more = of_row[first + 1] * unit + added[first + 1] - (of_row[first] * unit + added[first])
            doubt[b, n] = more > 0 if wanted == first else more < 0
        for block in range(len(high)):
            if not high[block] + less > top[b, most - 1]:
                continue
            low, past = max(block * LOGITS, first), min((block + 1) * LOGITS, count)
            for j in range(low, past):
                score = of_row[j] * unit + added[j] + less
                if score > top[b, most - 1] and (
                    j == wanted or (not must[b, n] and (j > first + 1 or ending[b, n] < 0))
                ):
                    place = most - 1
                    while place > 0 and top[b, place - 1] < score:
                        top[b, place], index[b, place] = top[b, place - 1], index[b, place - 1]
                        place -= 1
                    top[b, place], index[b, place] = score, n * count + j
