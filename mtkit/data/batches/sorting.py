"""Rows of two lengths in order of length, and where batches end among them."""

import numpy as np

WIDTH_DIGITS = 5
"""Binary digits before the zeros of a width: 30, 31, 32, 34, ..., 64, 68. So few widths make few shapes of matrix
products, at less than a hundredth more padding. A new shape costs more than its product: a CPU's library writes a
program for each in bfloat16, and keeps a thousand."""

ROW_DIGITS = 4
"""Binary digits before the zeros of a batch's number of rows, for the same reason: 15, 16, 18, ..., 32, 36."""

_TOGETHER = 1 << 16


def step(number: int, digits: int) -> int:
    """Between neighbours of a number's size that have so many binary digits before their zeros."""
    return 1 << max(number.bit_length() - digits, 0)


def edges_to(longest: int) -> np.ndarray:
    """Upper edges of the length buckets, up to `longest`, end mark counted: the widths of batches."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(min(edges[-1] + step(edges[-1], WIDTH_DIGITS), longest))
    return np.array(edges, dtype=np.int64)


def buckets_of(edges: np.ndarray) -> np.ndarray:
    """(longest,) the bucket of each length from 0, end mark not counted."""
    return np.searchsorted(edges, np.arange(1, int(edges[-1]) + 1))


def in_order(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The places of rows of these lengths, end marks not counted, in order of length.

    The order is by the wider side's bucket, then by the difference of the sides' buckets; that runs back and forth, so
    that neighbours are near.
    """
    edges = edges_to(int(max(source.max(), target.max())) + 1)
    buckets = buckets_of(edges)
    keys = np.empty(len(source), dtype=np.int64)
    for first in range(0, len(keys), _TOGETHER):  # few arrays of all rows at once: there may be millions
        some = slice(first, first + _TOGETHER)
        own, other = buckets[source[some]], buckets[target[some]]
        bucket, across = np.maximum(own, other), own - other
        bucket = bucket * (2 * len(edges) + 1) + len(edges) + np.where(bucket % 2 == 0, across, -across)
        # the place makes keys of one bucket different, so that any sort keeps their order
        keys[some] = (bucket << 32) + np.arange(first, first + len(own))
    keys.sort()
    keys &= (1 << 32) - 1
    return keys


def widths_of(edges: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(rows,) the widths of so many rows of each bucket, in order: no row is wider than that, end mark counted."""
    return np.repeat(edges.astype(np.int32), counts)


def sizes_of(widths: np.ndarray, batch_tokens: int) -> np.ndarray:
    """(batches,) how many rows go into each batch, of rows of non-decreasing widths.

    Rows times the widest of them stay within `batch_tokens`, or a single row is wider; their number is rounded down to
    `ROW_DIGITS` binary digits.
    """
    sizes, begin = [], 0
    while begin < len(widths):
        left = len(widths) - begin
        most = min(max(batch_tokens // int(widths[begin]), 1), left)
        # the last row may be wider than the first: as many as its width allows are certain to fit
        count = min(most, max(batch_tokens // int(widths[begin + most - 1]), 1))
        # what is left at the end goes together, as an update on a few rows would learn from noise
        sizes.append(count if count == left else count - count % step(count, ROW_DIGITS))
        begin += sizes[-1]
    return np.array(sizes, dtype=np.int64)
