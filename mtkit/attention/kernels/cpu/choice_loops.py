"""Loops of choices: the largest numbers of each row, and the newest members of groups."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, bits_of, compiled

NOTHING = np.int32(-0x7F800000)
"""Rank of minus infinity."""


@compiled("float32[:, ::1], int64[:, ::1], int64, int64", in_any_order=False)
def write_largest(scores: Floats, numbers: NDArray[np.int64], first: int, last: int) -> None:
    """Write the columns of the largest scores of each row, the largest first, of equal ones the lower column.

    Only rows `first` to `last` - 1. The number of columns marks a score of minus infinity or NaN. Scores
    become integers in the same order: vector units find the largest of these without branches.
    """
    columns, count = scores.shape[1], numbers.shape[1]
    ranks = np.empty(columns, np.int32)
    for row in range(first, last):
        some, chosen = scores[row], numbers[row]
        for column in range(columns):
            bits = bits_of(some[column])
            size = np.int32(bits & np.int32(0x7FFFFFFF))
            rank = np.int32(-size) if bits < 0 else size
            ranks[column] = NOTHING if size > np.int32(0x7F800000) else rank
        for place in range(count):
            largest = NOTHING
            for column in range(columns):
                largest = max(largest, ranks[column])
            number = np.int32(columns)
            if largest > NOTHING:
                for column in range(columns):
                    number = min(number, np.int32(column if ranks[column] == largest else columns))
                ranks[number] = NOTHING
            chosen[place] = number


@compiled("int32[:, :, :, ::1], int32[:, :, ::1], int64[:, :, ::1], int64, int64, boolean[:, :, ::1]")
def enlist_and_see(
    members: NDArray[np.int32],
    counts: NDArray[np.int32],
    group: NDArray[np.int64],
    position: int,
    chunk: int,
    seen: NDArray[np.bool_],
) -> None:
    """Append `position` to the list of its group in each round, and mark what is seen of the lists.

    group (R, H, rounds). members (R, H * rounds, groups, places) are rings of positions, and counts (R, H * rounds,
    groups) the numbers of positions written to them. A position sees the earlier members of its chunk, by rank, and
    of the chunk before it: seen (R, H, T), False at first.
    """
    rows, heads, rounds = group.shape
    places = members.shape[3]
    for row in range(rows):
        for h in range(heads):
            for r in range(rounds):
                g, stream = group[row, h, r], h * rounds + r
                ring, rank = members[row, stream, g], counts[row, stream, g]
                for earlier in range(max(rank // chunk - 1, 0) * chunk, rank):
                    seen[row, h, ring[earlier % places]] = True
                ring[rank % places] = position
                counts[row, stream, g] = rank + 1
