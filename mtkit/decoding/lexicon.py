"""The lexicon of a run for shortlists: the likeliest target pieces of each source piece, kept in the run's folder."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.data.vocabulary import vocabulary_of
from mtkit.decoding.ibm_model_1 import learn_probabilities, pieces_of, rows_to_learn_from
from mtkit.errors import MtkitError, RunError
from mtkit.runs import Run
from mtkit.storage.files import inside, write_tensors, writing
from mtkit.storage.weights import read_tensors
from mtkit.terminal import ProgressBar, Say, quiet, silent
from mtkit.text.tokenizer import BREAK, PAD, Tokenizers

FILE = "lexicon.safetensors"
"""Name of the lexicon in a run's folder."""

MOST = 100
"""Maximum stored translations per source piece."""

FREQUENT = 500
"""Number of most frequent target pieces, which are allowed in every translation."""


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
        """Return the lexicon with this number of likeliest translations per source piece."""
        return replace(self, translations=self.translations[:, : 1 + each])

    def shortlist(self, source: Tensor) -> Tensor:
        """Return the ids (K,), ascending, of the target pieces allowed in translations of source pieces (B, S).

        They are the frequent pieces, the translations of each source piece, marks such as EOS, and with separate
        vocabularies the target pieces that spell the source text, so that names can be copied.
        """
        translations = self.translations[source.cpu().unique()]
        allowed = [torch.arange(BREAK + 1), self.frequent.long(), translations.flatten().long()]
        if self.separate is not None:
            texts = [self.separate.source.decode(row) for row in source.tolist()]
            allowed += map(torch.tensor, filter(None, self.separate.target.encode_lines(texts, threads=1)))
        return torch.cat(allowed).unique().to(source.device)


def lexicon_for(run: Run, folder: Path, *, say: Say = quiet, progress: ProgressBar = silent) -> Lexicon:
    """Return the run's lexicon; at first use it is learned from prepared data in `folder`, and stored with the run.

    `say` gets a message if it was learned, or cannot be stored.

    Raises: MtkitError as `training_text`; RunError for a damaged lexicon.
    """
    lexicon = load_lexicon(run)
    if lexicon is None:
        lexicon = learn_lexicon(training_text(run, folder), progress)
        try:
            save_lexicon(run, lexicon)
            say(f"learned the lexicon from {folder}; it is kept in {run.folder / FILE}")
        except MtkitError as error:
            say(f"{error}; the lexicon will be learned again next time")
    return lexicon


def save_lexicon(run: Run, lexicon: Lexicon) -> None:
    """Save the lexicon in the run's folder, atomically. Raises: MtkitError if it cannot be written."""
    with writing(inside(run.folder, FILE)) as temporary:
        write_tensors(temporary, {"translations": lexicon.translations, "frequent": lexicon.frequent})


def load_lexicon(run: Run) -> Lexicon | None:
    """Load the lexicon in the run's folder; None if there is none. Raises: RunError if it is damaged or unreadable."""
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
    """Open the prepared data for a run's lexicon. Raises: MtkitError if it is missing or has another vocabulary."""
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
    """Learn the lexicon of prepared data's training side. Raises: DataError if all its segments are too long."""
    tokenizers = prepared.tokenizers
    pieces = pieces_of(prepared.train.target, rows_to_learn_from(prepared))
    counts = np.bincount(pieces, minlength=tokenizers.target.size)
    counts[: BREAK + 1] = 0
    frequent = np.argsort(-counts, kind="stable")[: min(FREQUENT, int((counts > 0).sum()))].astype(np.int32)
    learned = learn_probabilities(prepared, progress)
    rare = ~np.isin(learned.target, frequent)
    source, target, rank = _ranked(learned.source[rare], learned.target[rare], learned.likely[rare])
    translations = np.full((tokenizers.source.size, 1 + MOST), PAD, dtype=np.int32)
    translations[:, 0] = _same_piece(tokenizers)
    translations[source, 1 + rank] = target
    separate = None if tokenizers.joint else tokenizers
    return Lexicon(torch.from_numpy(translations), torch.from_numpy(frequent), separate)


def _ranked(source: np.ndarray, target: np.ndarray, likely: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the `MOST` likeliest pairs of each source piece: source, target, and the rank, from 0."""
    order = np.lexsort((-likely, source))
    source, target = source[order], target[order]
    rank = np.arange(len(order)) - np.searchsorted(source, source)
    best = rank < MOST
    return source[best], target[best], rank[best]


def _same_piece(tokenizers: Tokenizers) -> np.ndarray:
    """Return the target piece with the spelling of each source piece; PAD if there is none."""
    if tokenizers.joint:
        return np.arange(tokenizers.source.size)
    ids = {tokenizers.target.piece(number): number for number in range(tokenizers.target.size)}
    return np.array([ids.get(tokenizers.source.piece(number), PAD) for number in range(tokenizers.source.size)])
