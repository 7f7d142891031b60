"""A lexicon of the target pieces that translate each source piece, learned from training pairs by IBM Model 1.

Paper: Brown, Della Pietra, Della Pietra and Mercer, "The Mathematics of Statistical Machine Translation", Computational
Linguistics 19(2), 1993, section 4. In a pair of sentences each target piece y translates one source piece x, all of
which are equally likely a priori. The posterior probability of x is t(y | x) / sum_x' t(y | x'), and t(y | x) is the
share of y in the expected counts of x. The end mark of the source, which every sentence has, replaces the paper's empty
word, to which target pieces of any sentence are attributed.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError, MtkitError, RunError
from mtkit.runs import Run
from mtkit.storage.files import inside, write_tensors, writing
from mtkit.storage.weights import read_tensors
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import BREAK, EOS, PAD, Tokenizers

FILE = "lexicon.safetensors"
"""Name of the lexicon in a run's folder."""

MOST = 100
"""Maximum stored translations per source piece."""

FREQUENT = 500
"""Number of most frequent target pieces, which are allowed in every translation."""

ITERATIONS = 5
"""Iterations of expectation and maximisation."""

CELLS = 1 << 25
"""Maximum pairs of a source and a target piece in one sentence to learn from: a quarter of a minute's work, and 1.6 GiB
of memory. Of more training data, every n-th pair of sentences is used."""

LONGEST = 1000
"""Maximum pieces of a side: longer pairs cost more than they contribute."""


@dataclass(frozen=True)
class Lexicon:
    """The likeliest translations of each source piece, and the most frequent target pieces."""

    translations: Tensor
    """(source pieces, 1 + N) int32: the target piece with the same spelling, for names, then N translations that are
    not frequent pieces, the likeliest first; PAD in unused places."""
    frequent: Tensor
    """(FREQUENT,) int32, or as many as exist: the most frequent target pieces, in descending order."""
    separate: Tokenizers | None = None
    """The tokenizers of separate vocabularies, whose target side splits names in its own way; None if one is shared."""

    @property
    def each(self) -> int:
        """N, the maximum number of translations per source piece."""
        return self.translations.shape[1] - 1

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""
        return hashlib.sha256(self.translations.numpy().tobytes() + self.frequent.numpy().tobytes()).hexdigest()

    def cut(self, each: int) -> "Lexicon":
        """The lexicon restricted to this number of likeliest translations per source piece."""
        return replace(self, translations=self.translations[:, : 1 + each])

    def shortlist(self, source: Tensor) -> Tensor:
        """Ids (K,), ascending, of the target pieces allowed in translations of source pieces (B, S).

        They are the frequent pieces, the translations of each source piece, marks such as EOS, and with separate
        vocabularies the target pieces that spell the source text, so that names can be copied.
        """
        translations = self.translations[source.cpu().unique()]
        allowed = [torch.arange(BREAK + 1), self.frequent.long(), translations.flatten().long()]
        if self.separate is not None:
            texts = [self.separate.source.decode(row) for row in source.tolist()]
            allowed += map(torch.tensor, filter(None, self.separate.target.encode_lines(texts, threads=1)))
        return torch.cat(allowed).unique().to(source.device)


def save_lexicon(run: Run, lexicon: Lexicon) -> None:
    """Saves the lexicon in the run's folder, atomically. Raises: MtkitError if it cannot be written."""
    with writing(inside(run.folder, FILE)) as temporary:
        write_tensors(temporary, {"translations": lexicon.translations, "frequent": lexicon.frequent})


def load_lexicon(run: Run) -> Lexicon | None:
    """The lexicon in the run's folder, if there is one. Raises: RunError if it is damaged or unreadable."""
    path = run.folder / FILE
    if not path.exists():
        return None
    try:
        tensors = read_tensors(path)
        # copies, because reading a mapped file that another process truncates kills this process
        copies = tensors["translations"].clone(), tensors["frequent"].clone()
        lexicon = Lexicon(*copies, None if run.tokenizers.joint else run.tokenizers)
        if lexicon.translations.shape != (run.tokenizers.source.size, 1 + MOST) or lexicon.frequent.dim() != 1:
            raise ValueError
        for pieces in (lexicon.translations, lexicon.frequent):
            if pieces.dtype != torch.int32 or not ((pieces >= 0) & (pieces < run.tokenizers.target.size)).all():
                raise ValueError
    except (RunError, KeyError, ValueError) as error:
        if isinstance(error.__cause__, OSError):
            raise  # the file may be intact
        raise RunError(f"{path} is damaged or of another version; delete it, and it will be learned again") from error
    return lexicon


def training_text(run: Run, folder: Path) -> Prepared:
    """The prepared data for a run's lexicon. Raises: MtkitError if it is missing or has another vocabulary."""
    if not (folder / "prepared.json").is_file():
        raise MtkitError(
            f"{run.folder} has no lexicon yet, and there is no prepared data in {folder} to learn it from; "
            "`mtkit translate` takes another folder by --data"
        )
    prepared = open_prepared(folder)
    if vocabulary_of(folder / "tokenizer") != run.vocabulary:
        raise MtkitError(
            f"{folder} has other pieces than {run.folder}, whose lexicon is to be learned from it; "
            "`mtkit translate` takes the data it was trained on by --data"
        )
    return prepared


def learn_lexicon(prepared: Prepared, progress: ProgressBar = silent) -> Lexicon:
    """The lexicon of the training side of prepared data. Raises: DataError if all its segments are too long."""
    tokenizers, target_pieces = prepared.tokenizers, prepared.tokenizers.target.size
    counts = np.bincount(_flat(prepared.train.target, _rows(prepared)), minlength=target_pieces)
    counts[: BREAK + 1] = 0
    frequent = np.argsort(-counts, kind="stable")[: min(FREQUENT, int((counts > 0).sum()))].astype(np.int32)
    source, target, likely = _model_1(prepared, progress)
    rare = ~np.isin(target, frequent)
    source, target, rank = _ranked(source[rare], target[rare], likely[rare])
    translations = np.full((tokenizers.source.size, 1 + MOST), PAD, dtype=np.int32)
    translations[:, 0] = _same_piece(tokenizers)
    translations[source, 1 + rank] = target
    separate = None if tokenizers.joint else tokenizers
    return Lexicon(torch.from_numpy(translations), torch.from_numpy(frequent), separate)


@dataclass(frozen=True)
class Probabilities:
    """t(y | x) of all pieces x and y that occur in a training sentence together, frequent ones included."""

    pairs: np.ndarray
    """(pairs,) int64, ascending: x * target pieces + y."""
    likely: np.ndarray
    """(pairs,) float64."""
    target_pieces: int

    def of(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """(T, S) float64: t(y | x) of each target piece y and source piece x, 0 if they never occurred together."""
        wanted = np.asarray(source, dtype=np.int64) * self.target_pieces + np.asarray(target, dtype=np.int64)[:, None]
        at = np.searchsorted(self.pairs, wanted).clip(max=len(self.pairs) - 1)
        return np.where(self.pairs[at] == wanted, self.likely[at], 0.0)


def learn_probabilities(prepared: Prepared, progress: ProgressBar = silent) -> Probabilities:
    """t(y | x) of the training side of prepared data. Raises: DataError if all its segments are too long."""
    target_pieces = prepared.tokenizers.target.size
    source, target, likely = _model_1(prepared, progress)
    return Probabilities(source * target_pieces + target, likely, target_pieces)


def _rows(prepared: Prepared) -> np.ndarray:
    """The training rows to learn from: all that are not too long, or every n-th, with n as small as `CELLS` allows.

    Raises: DataError if all are too long.
    """
    source, target = prepared.train.source.lengths, prepared.train.target.lengths
    rows = np.flatnonzero(np.maximum(source, target) <= LONGEST)
    if not len(rows):
        raise DataError(f"all training segments of {prepared.folder} are too long to learn a lexicon from")
    cells = (source[rows].astype(np.int64) + 1) * target[rows]
    return rows[:: max(1, -(-int(cells.sum()) // CELLS))]


def _flat(tokens: Tokens, rows: np.ndarray, last: int | None = None) -> np.ndarray:
    """The pieces of these rows, concatenated, with `last` after each row if given; int64."""
    ends = [] if last is None else [np.array([last], dtype=np.int32)]
    parts = [part for row in rows for part in (tokens[row], *ends)]
    return np.concatenate(parts).astype(np.int64)


def _cooccurrences(prepared: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of each target piece with each source piece of its sentence, the end mark of the source included.

    Gives the pairs as source * target pieces + target, in order of the target pieces, and each target piece's number of
    pairs.
    """
    rows, source, target = _rows(prepared), prepared.train.source, prepared.train.target
    lengths = source.lengths[rows].astype(np.int64) + 1
    first = np.cumsum(lengths) - lengths
    sentence = np.repeat(np.arange(len(rows)), target.lengths[rows])
    sizes = lengths[sentence]
    begins = np.cumsum(sizes) - sizes
    places = np.arange(sizes.sum())
    places += np.repeat(first[sentence] - begins, sizes)
    pairs = _flat(source, rows, EOS)[places]
    pairs *= prepared.tokenizers.target.size
    pairs += np.repeat(_flat(target, rows), sizes)
    return pairs, sizes


def _model_1(prepared: Prepared, progress: ProgressBar) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t(y | x) of the pairs that occur in training sentences, as x, y and t, in order of x and y."""
    pairs, sizes = _cooccurrences(prepared)
    distinct, cell = np.unique(pairs, return_inverse=True)
    del pairs
    source, target = distinct // prepared.tokenizers.target.size, distinct % prepared.tokenizers.target.size
    begins = np.cumsum(sizes) - sizes
    likely = np.ones(len(distinct))
    for _ in progress(range(ITERATIONS), "learning the lexicon", ITERATIONS):
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
    """The target piece with the spelling of each source piece; PAD if there is none."""
    if tokenizers.joint:
        return np.arange(tokenizers.source.size)
    ids = {tokenizers.target.piece(number): number for number in range(tokenizers.target.size)}
    return np.array([ids.get(tokenizers.source.piece(number), PAD) for number in range(tokenizers.source.size)])
