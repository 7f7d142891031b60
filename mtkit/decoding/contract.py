"""The contract of decoding engines: source batches in, hypotheses out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import PAD


class StoppedError(Exception):
    """The result of a search is no longer wanted (`SourceBatch.stopped`)."""


@dataclass(frozen=True)
class Term:
    """A term that a translation must contain."""

    forms: tuple[tuple[int, ...], ...]
    """Its spellings as pieces; a translation may use any of them."""
    count: int = 1
    """Number of times that it must occur."""

    @property
    def size(self) -> int:
        """The minimum number of pieces of its occurrences."""
        return self.count * min(map(len, self.forms))


@dataclass(frozen=True)
class RequiredTerms:
    """The terms of a batch. An occurrence is a whole word: no letter or digit touches a letter or digit at its ends."""

    of_segments: list[tuple[Term, ...]]
    """The terms of each segment."""
    starts_inside: Tensor
    """(V,) bool, True for pieces that can continue a word: their first character is a letter or digit."""
    ends_inside: Tensor
    """(V,) bool, True for pieces that a word can go on after: their last character is a letter or digit."""


@dataclass(frozen=True)
class SourceBatch:
    """Source segments to decode together."""

    source: Tensor
    """(B, S) pieces with EOS at the end, padded on the right."""
    limits: list[int]
    """Maximum pieces of a hypothesis, EOS counted, for each segment."""
    keys: Tensor
    """(B,) integers that identify the segments; they seed sampling, so that a draw does not depend on the batch."""
    task: Tensor | None = None
    """(B,) the direction of each segment, if the model has several."""
    pieces: Tensor | None = None
    """(K,) ids of the pieces that may be generated; PAD, UNK, BOS and EOS come first, as in the vocabulary. None: all.
    The search numbers pieces by their index in this list."""
    lines: list[list[int]] | None = None
    """For each segment, the maximum pieces per line of its translation, with the break or EOS at its end; None: any
    number of lines."""
    prefixes: list[tuple[int, ...]] | None = None
    """The pieces with which each translation must begin: a given beginning, or given first lines, each with the break
    after it; None: none is given. Numbered as in `pieces`."""
    terms: RequiredTerms | None = None
    """The terms that translations must contain; only beam search supports them, without `pieces` and `lines` that are
    joined. None: none."""
    stopped: Callable[[], bool] | None = None
    """Returns whether the result is no longer wanted; called at each step. None: it is always wanted."""

    def restricted(self, pieces: Tensor) -> "SourceBatch":
        """Restrict generation to `pieces` (K,), ascending ids, and the pieces of prefixes; return the new batch.

        The batch itself must not be restricted.
        """
        if self.prefixes is None:
            return replace(self, pieces=pieces)
        begun = torch.tensor([piece for prefix in self.prefixes for piece in prefix], device=pieces.device)
        pieces = torch.cat([pieces, begun]).unique()
        numbers = {piece: number for number, piece in enumerate(pieces.tolist())}
        return replace(self, pieces=pieces, prefixes=[tuple(map(numbers.__getitem__, row)) for row in self.prefixes])

    def check(self) -> None:
        """Raises: StoppedError if the result is no longer wanted."""
        if self.stopped is not None and self.stopped():
            raise StoppedError

    @cached_property
    def valid(self) -> Tensor:
        """(B, S), True at real pieces."""
        return self.source != PAD

    @cached_property
    def longest(self) -> int:
        """The maximum number of steps of the search."""
        return max(self.limits)

    @cached_property
    def limit(self) -> Tensor:
        """The limits (B,), on the device."""
        return torch.tensor(self.limits, device=self.source.device)


@dataclass(frozen=True)
class Hypotheses:
    """N hypotheses for each of B segments, best first; a log-probability of -inf marks one that does not exist."""

    pieces: Tensor
    """(B, N, L), EOS included, then PAD."""
    log_probs: Tensor
    """(B, N) float32, the model's log-probability of the pieces, EOS included, over the allowed pieces."""
    scores: Tensor
    """(B, N) float32, the scores by which they are ranked."""
    astray: Tensor | None = None
    """(B, N), whether a hypothesis of joined lines has lost its place (`mtkit.decoding.search.endings`); None: none."""

    @property
    def lengths(self) -> Tensor:
        """(B, N) pieces, EOS counted."""
        return (self.pieces != PAD).sum(-1)

    def with_ids(self, pieces: Tensor | None) -> "Hypotheses":
        """Replace indices into `pieces` (K,) (`SourceBatch.pieces`) by vocabulary ids; return the new hypotheses."""
        return self if pieces is None else replace(self, pieces=pieces[self.pieces])

    def ranked(self) -> "Hypotheses":
        """Return the same hypotheses, sorted by descending score in each segment; equal scores keep their order."""
        return self.at(self.scores.argsort(dim=1, descending=True, stable=True))

    def at(self, order: Tensor) -> "Hypotheses":
        """Return the hypotheses with the numbers `order` (B, N')."""
        pieces = self.pieces.gather(1, order[..., None].expand(-1, -1, self.pieces.shape[2]))
        astray = None if self.astray is None else self.astray.gather(1, order)
        return Hypotheses(pieces, self.log_probs.gather(1, order), self.scores.gather(1, order), astray)


class Engine(Protocol):
    """A model with decoding settings, decoded by mtkit (`ModelEngine`) or by another program.

    Callers handle text, documents, directions and resuming. An engine gets batches of source segments with a limit for
    each, on a CPU from several threads at once. The engine handles shortlists and the number type.
    """

    @property
    def settings(self) -> DecodingSettings:
        """The decoding settings."""

    @property
    def max_parallel(self) -> int:
        """The maximum number of batches that are computed at a time, on a CPU."""

    @property
    def longest_source(self) -> int | None:
        """The maximum number of source pieces, EOS counted; None: no limit."""

    @property
    def longest_target(self) -> int | None:
        """The maximum number of target pieces, EOS counted; None: no limit."""

    @property
    def identity(self) -> dict[str, Any]:
        """The JSON values that determine its hypotheses, in addition to weights and batch.

        Engines that may give different hypotheses have different identities, which a resumed translation compares.
        """

    def check(self) -> None:
        """Raises: MtkitError that names the first setting that the engine does not support."""

    def ready(self) -> AbstractContextManager[torch.device]:
        """The context for all calls of `translate` and `log_probs`; gives the device of the batches."""

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """Return each segment's hypotheses, best first: at least `settings.n_best`; with `mbr`, `hypotheses`."""

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """Return the log-probability of each target piece, given its source and the pieces before it: (B, T) float32.

        source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,). Padding has 0.
        Raises: MtkitError if the engine cannot score given translations.
        """
