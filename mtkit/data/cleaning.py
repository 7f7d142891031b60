"""Cleaning: unusual segment pairs, all of them counted, and which of them training leaves out."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from mtkit.recipe.data import Cleaning
from mtkit.terminal import ProgressBar, silent
from mtkit.text.segments import Ragged, mix
from mtkit.text.tokenizer import UNK

REASONS = {
    "empty": "with an empty side",
    "overlap": "also in a validation or test side",
    "duplicates": "seen before",
    "identical": "with both sides the same",
    "length_ratio": "with sides of very different length",
    "over_long": "over data.cleaning.max_pieces",
}
"""Reasons for leaving pairs out, in order of precedence: each pair that is left out has one reason."""

_RATIO = 4.0
"""Length ratio above which pairs are counted if the settings have none."""

_EDGES = np.arange(1, 32, dtype=np.uint64) << np.uint64(59)
"""The hashes at which the value of their five highest bits changes."""

_HALF = np.uint64(32)
"""Bits of half a hash."""

_AT_ONCE = 1 << 21
"""Hashes that are searched together for duplicates."""

_SHORT = 10
"""Pieces up to which the length ratio is ignored: "No." may well be five words in another language."""


def pair_hashes(
    direction: str, source: Ragged, target: Ragged, sources: Sequence[str], targets: Sequence[str]
) -> np.ndarray:
    """Return (pairs,) uint64, equal for pairs of one direction with equal text, spaces aside.

    All pairs are hashed at once: each piece is mixed with its place, a side is the sum of its pieces, a pair mixes both
    sides. If a piece is unknown, the text is mixed in as well, since different words have the same unknown piece.
    """
    hashes = mix(mix(_row_sums(source) + _hash(direction)) + _row_sums(target))
    unknown = [np.repeat(np.arange(len(side.lengths)), side.lengths)[side.flat == UNK] for side in (source, target)]
    for row in np.unique(np.concatenate(unknown)).tolist():
        hashes[row] ^= _hash("\n".join(" ".join(text.split()) for text in (sources[row], targets[row])))
    return hashes


def _hash(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


def _row_sums(side: Ragged) -> np.ndarray:
    """Return (rows,) uint64, modulo 2^64."""
    places = np.arange(len(side.flat)) - np.repeat(side.starts, side.lengths)
    return side.sums(mix(mix(side.flat.astype(np.uint64)) + places.astype(np.uint64)))


def _repeated(hashes: np.ndarray) -> np.ndarray:
    """Return (n,) bool: whether each hash came before among these."""
    repeated = np.ones(len(hashes), dtype=bool)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    return repeated


class Seen:
    """A set of hashes, 8 bytes each: sorted runs, by the highest bits of the hashes.

    Each run is more than twice as long as the next. Only runs with the same highest bits are merged at a time, so the
    copy that merging takes is small.
    """

    def __init__(self) -> None:
        self._runs: list[list[np.ndarray]] = [[] for _ in range(len(_EDGES) + 1)]

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes; return (n,) bool: whether each was in the set, or came before among these."""
        again = _repeated(hashes) | self.hold(hashes)
        new = np.sort(hashes[~again])
        for runs, part in zip(self._runs, np.split(new, np.searchsorted(new, _EDGES)), strict=True):
            run = part.copy()
            while runs and len(runs[-1]) <= 2 * len(run):
                run = np.concatenate([runs.pop(), run])
                run.sort(kind="stable")  # in place: a copy would be as large as all of these
            if len(run):
                runs.append(run)
        return again

    def hold(self, hashes: np.ndarray) -> np.ndarray:
        """Return (n,) bool: whether each hash is in the set."""
        order = np.argsort(hashes)
        parts = np.split(hashes[order], np.searchsorted(hashes, _EDGES, sorter=order))
        held = np.empty(len(hashes), dtype=bool)
        held[order] = np.concatenate([_in_runs(runs, part) for runs, part in zip(self._runs, parts, strict=True)])
        return held


def _in_runs(runs: Sequence[np.ndarray], hashes: np.ndarray) -> np.ndarray:
    held = np.zeros(len(hashes), dtype=bool)
    for run in runs:
        held |= run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes
    return held


class Repeats:
    """The duplicates of a stream, found in advance: all hashes are read once per two million pairs.

    Memory hardly grows with the stream: one bit per pair is kept.
    """

    def __init__(self, hashes: Callable[[], Iterable[np.ndarray]], progress: ProgressBar = silent) -> None:
        """`hashes` reads the hashes of the stream, (n,) uint64 at a time."""
        pairs = sum(map(len, hashes()))
        readings = -(-pairs // _AT_ONCE)
        self._bits = np.zeros(-(-pairs // 8), np.uint8)
        self._place = 0
        for number in progress(range(readings), "finding duplicates", readings):
            self._mark(hashes(), np.uint64(number), np.uint64(readings))

    def _mark(self, stream: Iterable[np.ndarray], number: np.uint64, readings: np.uint64) -> None:
        """Set the bits of duplicates whose hashes are in one of `readings` ranges."""
        parts, places, rows = [], [], 0
        for hashes in stream:
            in_range = np.flatnonzero((hashes >> _HALF) * readings >> _HALF == number)
            parts.append(hashes[in_range])
            places.append(in_range + rows)
            rows += len(hashes)
        place = np.concatenate(places)[_repeated(np.concatenate(parts))]
        np.bitwise_or.at(self._bits, place >> 3, (1 << (place & 7)).astype(np.uint8))

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of the stream's next pairs, of these hashes, came before."""
        place = np.arange(self._place, self._place + len(hashes))
        self._place += len(hashes)
        return (self._bits[place >> 3] >> (place & 7)) & 1 == 1


def examine(
    hashes: np.ndarray,
    identical: np.ndarray,
    lengths: tuple[np.ndarray, np.ndarray],
    settings: Cleaning,
    seen: Seen | Repeats,
    held_out: Seen | None,
) -> dict[str, np.ndarray]:
    """Return, for each of `REASONS`, the pairs to which it applies, (pairs,) bool.

    `lengths`: the pieces of both sides; `held_out`: the pairs of the validation and test sides, None for these.
    """
    shorter, longer = np.minimum(*lengths), np.maximum(*lengths)
    most = np.inf if settings.max_pieces is None else settings.max_pieces
    full = shorter > 0  # blank lines end documents: they are no duplicates of one another
    return {
        "empty": ~full,
        "overlap": np.zeros(len(hashes), dtype=bool) if held_out is None else held_out.hold(hashes) & full,
        "duplicates": seen.add(hashes) & full,
        "identical": identical & full,
        "length_ratio": (longer > _SHORT) & full & (longer > (settings.length_ratio or _RATIO) * shorter),
        "over_long": longer > most,
    }


def left_out(found: dict[str, np.ndarray], settings: Cleaning) -> dict[str, np.ndarray]:
    """Return the pairs that training leaves out, (pairs,) bool per reason, each pair under its first reason."""
    applies = {
        "empty": True,
        "overlap": settings.overlap,
        "duplicates": settings.duplicates,
        "identical": settings.identical,
        "length_ratio": settings.length_ratio is not None,
        "over_long": settings.max_pieces is not None,
    }
    gone = np.zeros_like(found["empty"])
    result = {}
    for reason, pairs in found.items():
        result[reason] = pairs & ~gone if applies[reason] else np.zeros_like(gone)
        gone |= result[reason]
    return result
