"""Which target pieces each source piece is translated by, learned from training pairs: IBM Model 1.

Paper: Brown, Della Pietra, Della Pietra and Mercer, "The Mathematics of Statistical Machine Translation", Computational
Linguistics 19(2), 1993, section 4. In a pair of sentences each target piece y is the translation of one source piece x,
of whichever as likely beforehand, so that it is x's with the probability t(y | x) / sum_x' t(y | x'); t(y | x) is the
share of y among all that falls to x. The end mark of the source, which stands in every sentence, plays the part of the
paper's empty word: to it falls what every sentence may hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.data.prepared import Prepared, Tokens, open_prepared
from mtkit.data.tokenizer import BREAK, EOS, PAD, Tokenizers
from mtkit.errors import MtkitError
from mtkit.files import writing
from mtkit.runs import Run, read_tensors, vocabulary_of

FILE = "lexicon.safetensors"
"""Its name in a run's folder."""

MOST = 100
"""Translations kept of each source piece."""

FREQUENT = 500
"""Most frequent target pieces, which may come in every translation."""

ITERATIONS = 5
"""Of expectation and maximisation."""

CELLS = 1 << 25
"""Pairs of a source and a target piece in one sentence that are learned from at most: half a minute's work, and 1 GiB
of memory. Of more training data, every n-th pair of sentences."""

Progress = Callable[[int, int], object]
"""Called with how many of how many steps are done."""


@dataclass(frozen=True)
class Lexicon:
    """The likeliest translations of each source piece, beside the target pieces that are frequent anyway."""

    translations: Tensor
    """(source pieces, 1 + MOST) int32: the target piece that is spelt the same, for names, then the translations that
    are not frequent, the likeliest first; PAD where there are none."""
    frequent: Tensor
    """(FREQUENT,) int32, or as many as there are: the most frequent target pieces, the first the most."""

    def shortlist(self, source: Tensor, each: int) -> Tensor:
        """Ids, rising (K,), of the target pieces that may come in translations of source pieces (B, S).

        The frequent ones, `each` translations of each source piece, and what belongs to no text, as EOS.
        """
        translations = self.translations[source.cpu().unique(), : 1 + each]
        every = [torch.arange(BREAK + 1), self.frequent.long(), translations.flatten().long()]
        return torch.cat(every).unique().to(source.device)

    def save(self, path: Path) -> None:
        """As a safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        with writing(path) as temporary:
            save_file({"translations": self.translations, "frequent": self.frequent}, temporary)

    @classmethod
    def load(cls, path: Path) -> "Lexicon":
        """What `save` wrote. Raises: RunError where it is missing or damaged."""
        found = read_tensors(path)
        return cls(found["translations"], found["frequent"])


def lexicon_of(run: Run, folder: Path, on_progress: Progress = lambda done, total: None) -> Lexicon:
    """The lexicon of a run: where it has none yet, learned from the prepared data in `folder`, and kept with the run.

    Raises: MtkitError where there is no such data, or data with other pieces.
    """
    path = run.folder / FILE
    if not path.exists():
        prepared = open_prepared(folder)
        if vocabulary_of(folder / "tokenizer") != run.vocabulary:
            raise MtkitError(
                f"{folder} has other pieces than {run.folder}, whose lexicon is to be learned from it; "
                "give the prepared data it was trained on with --data"
            )
        learn(prepared, on_progress).save(path)
    return Lexicon.load(path)


def learn(prepared: Prepared, on_progress: Progress = lambda done, total: None) -> Lexicon:
    """The lexicon of the training side of prepared data."""
    tokenizers, side = prepared.tokenizers, prepared.train
    rows = _sample(side.source.lengths, side.target.lengths)
    counts = np.bincount(_flat(side.target, rows), minlength=tokenizers.target.size)
    counts[: BREAK + 1] = 0
    frequent = np.argsort(-counts, kind="stable")[: min(FREQUENT, int((counts > 0).sum()))].astype(np.int32)
    source, target, likely = _model_1(*_together(side.source, side.target, rows), len(counts), on_progress)
    rare = ~np.isin(target, frequent)
    source, target, rank = _ranked(source[rare], target[rare], likely[rare])
    translations = np.full((tokenizers.source.size, 1 + MOST), PAD, dtype=np.int32)
    translations[:, 0] = _same_piece(tokenizers)
    translations[source, 1 + rank] = target
    return Lexicon(torch.from_numpy(translations), torch.from_numpy(frequent))


def _sample(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The rows to learn from: all, or every n-th, n as small as `CELLS` allows."""
    cells = (source.astype(np.int64) + 1) * target
    return np.arange(0, len(cells), max(1, -(-int(cells.sum()) // CELLS)))


def _flat(tokens: Tokens, rows: np.ndarray, last: int | None = None) -> np.ndarray:
    """The pieces of these rows one after the other, `last` behind each where given; int64."""
    ends = [] if last is None else [np.array([last], dtype=np.int32)]
    parts = [part for row in rows for part in (tokens[row], *ends)]
    return np.concatenate(parts).astype(np.int64)


def _together(source: Tokens, target: Tokens, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each target piece with each source piece of its sentence, the source's end mark among them.

    Gives the target pieces (T,), how many source pieces each has beside it (T,), and those, one target piece's after
    the other's.
    """
    lengths = source.lengths[rows].astype(np.int64) + 1
    first = np.cumsum(lengths) - lengths
    sentence = np.repeat(np.arange(len(rows)), target.lengths[rows])
    sizes = lengths[sentence]
    begins = np.cumsum(sizes) - sizes
    places = np.arange(sizes.sum()) + np.repeat(first[sentence] - begins, sizes)
    return _flat(target, rows), sizes, _flat(source, rows, EOS)[places]


def _model_1(
    targets: np.ndarray, sizes: np.ndarray, sources: np.ndarray, target_pieces: int, on_progress: Progress
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t(y | x) of the pairs that occur: x, y and t, in the order of x."""
    on_progress(0, 1 + ITERATIONS)
    pairs, cell = np.unique(sources * target_pieces + np.repeat(targets, sizes), return_inverse=True)
    source, target = pairs // target_pieces, pairs % target_pieces
    begins = np.cumsum(sizes) - sizes
    likely = np.ones(len(pairs))
    for iteration in range(ITERATIONS):
        on_progress(1 + iteration, 1 + ITERATIONS)
        share = likely[cell]
        share /= np.repeat(np.add.reduceat(share, begins), sizes)
        counts = np.bincount(cell, weights=share)
        likely = counts / np.bincount(source, weights=counts)[source]
    return source, target, likely


def _ranked(source: np.ndarray, target: np.ndarray, likely: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `MOST` likeliest pairs of each source piece: source, target, and the rank, from 0."""
    order = np.lexsort((-likely, source))
    source, target = source[order], target[order]
    rank = np.arange(len(order)) - np.searchsorted(source, source)
    best = rank < MOST
    return source[best], target[best], rank[best]


def _same_piece(tokenizers: Tokenizers) -> np.ndarray:
    """For each source piece, the target piece that is spelt the same; PAD where there is none."""
    if tokenizers.joint:
        return np.arange(tokenizers.source.size)
    numbers = {tokenizers.target.piece(number): number for number in range(tokenizers.target.size)}
    return np.array([numbers.get(tokenizers.source.piece(number), PAD) for number in range(tokenizers.source.size)])
