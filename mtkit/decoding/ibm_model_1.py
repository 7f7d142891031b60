"""Translation probabilities of pieces, learned from training pairs by IBM Model 1.

Paper: Brown, Della Pietra, Della Pietra and Mercer, "The Mathematics of Statistical Machine Translation", Computational
Linguistics 19(2), 1993, section 4. In a pair of sentences each target piece y translates one source piece x, all of
which are equally likely a priori. The posterior probability of x is t(y | x) / sum_x' t(y | x'), and t(y | x) is the
share of y in the expected counts of x. The end mark of the source, which every sentence has, replaces the paper's empty
word, to which target pieces of any sentence are attributed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Prepared
from mtkit.errors import DataError
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import EOS

ITERATIONS = 5
"""Iterations of expectation and maximisation."""

CELLS = 1 << 25
"""Maximum pairs of a source and a target piece in one sentence to learn from: a quarter of a minute's work, and 1.6 GiB
of memory. Of more training data, every n-th pair of sentences is used."""

LONGEST = 1000
"""Maximum pieces of a side: longer pairs cost more than they contribute."""


@dataclass(frozen=True)
class Probabilities:
    """t(y | x) of all pieces x and y that occur in a training sentence together."""

    pairs: np.ndarray
    """(pairs,) int64, ascending: x * target pieces + y."""
    likely: np.ndarray
    """(pairs,) float64."""
    target_pieces: int

    @property
    def source(self) -> np.ndarray:
        """(pairs,) int64: the source piece x of each pair."""
        return self.pairs // self.target_pieces

    @property
    def target(self) -> np.ndarray:
        """(pairs,) int64: the target piece y of each pair."""
        return self.pairs % self.target_pieces

    def of(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """Return t(y | x) of each target piece y and source piece x, (T, S) float64; 0 if they never occur together."""
        wanted = np.asarray(source, dtype=np.int64) * self.target_pieces + np.asarray(target, dtype=np.int64)[:, None]
        at = np.searchsorted(self.pairs, wanted).clip(max=len(self.pairs) - 1)
        return np.where(self.pairs[at] == wanted, self.likely[at], 0.0)


def learn_probabilities(prepared: Prepared, progress: ProgressBar = silent) -> Probabilities:
    """Learn t(y | x) from the training side of prepared data. Raises: DataError if all its segments are too long."""
    pairs, sizes = _cooccurrences(prepared)
    distinct, cells = np.unique(pairs, return_inverse=True)
    del pairs
    target_pieces = prepared.tokenizers.target.size
    iterations = progress(range(ITERATIONS), "learning the lexicon", ITERATIONS)
    likely, _ = expectation_maximisation(distinct // target_pieces, cells, sizes, iterations)
    return Probabilities(distinct, likely, target_pieces)


def expectation_maximisation(
    source: np.ndarray,
    cells: np.ndarray,
    sizes: np.ndarray,
    iterations: Iterable[object],
    prior: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate t(y | x) of distinct pairs of a source word x and a target word y; return it with the expected counts.

    source (pairs,): x of each distinct pair. cells (cells,): the distinct pair of each target word of the text with
    each source word of its sentence, in the order of the target words; sizes (target words,): the cells of each target
    word; prior (cells,): prior probabilities of the source words, None if all are equally likely.
    """
    begins = np.cumsum(sizes) - sizes
    likely = np.ones(len(source))
    for _ in iterations:
        share = likely[cells]
        if prior is not None:
            share *= prior
        share /= np.repeat(np.add.reduceat(share, begins), sizes)
        counts = np.bincount(cells, weights=share)
        likely = counts / np.bincount(source, weights=counts)[source]
    return likely, counts


def rows_to_learn_from(prepared: Prepared) -> np.ndarray:
    """Return the training rows that are not too long, or every n-th of them, with n as small as `CELLS` allows.

    Raises: DataError if all are too long.
    """
    source, target = prepared.train.source.lengths, prepared.train.target.lengths
    rows = np.flatnonzero(np.maximum(source, target) <= LONGEST)
    if not len(rows):
        raise DataError(f"all training segments of {prepared.folder} are too long to learn a lexicon from")
    cells = (source[rows].astype(np.int64) + 1) * target[rows]
    return rows[:: max(1, -(-int(cells.sum()) // CELLS))]


def pieces_of(tokens: Tokens, rows: np.ndarray, last: int | None = None) -> np.ndarray:
    """Concatenate the pieces of these rows, with `last` after each row if given; int64."""
    ends = [] if last is None else [np.array([last], dtype=np.int32)]
    parts = [part for row in rows for part in (tokens[row], *ends)]
    return np.concatenate(parts).astype(np.int64)


def _cooccurrences(prepared: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """Pair each target piece with each source piece of its sentence, the end mark of the source included.

    Return the pairs as source * target pieces + target, in order of the target pieces, and each target piece's number
    of pairs.
    """
    rows, source, target = rows_to_learn_from(prepared), prepared.train.source, prepared.train.target
    lengths = source.lengths[rows].astype(np.int64) + 1
    first = np.cumsum(lengths) - lengths
    sentence = np.repeat(np.arange(len(rows)), target.lengths[rows])
    sizes = lengths[sentence]
    begins = np.cumsum(sizes) - sizes
    places = np.arange(sizes.sum())
    places += np.repeat(first[sentence] - begins, sizes)
    pairs = pieces_of(source, rows, EOS)[places]
    pairs *= prepared.tokenizers.target.size
    pairs += np.repeat(pieces_of(target, rows), sizes)
    return pairs, sizes
