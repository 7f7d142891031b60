"""How hypotheses end: by EOS, and in the joint translation of several lines by a break after each line but the last.

The translation of n joined lines gets exactly n - 1 breaks, so that it comes apart into its lines: EOS is forbidden
before the last line, a break in it, and both directly after a break. The last pieces before the limit are breaks and
EOS, if the lines are not complete by then. If a translation's beginning is given, only its pieces may follow there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtkit.decoding.contract import SourceBatch
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD

NEITHER, ANY = 0, -1
"""Values of `Endings.piece`: neither EOS nor a break may follow; or both may, as breaks are not counted."""


@dataclass(frozen=True)
class Endings:
    """Which of EOS and a break may be the next piece of each hypothesis, and which piece must be."""

    piece: Tensor | None
    """(B, N): EOS, BREAK, NEITHER or ANY, or the given piece that must follow; None: EOS for all."""
    must: Tensor | None
    """(B, N), True if no other piece than `piece` (for ANY, EOS) may follow; None: others may."""

    def apply(self, log_probs: Tensor) -> None:
        """Set the log-probabilities (B, N, V) of forbidden pieces to -inf, in place."""
        if self.piece is None:
            log_probs[..., BREAK] = -torch.inf
        else:
            log_probs[..., EOS].masked_fill_((self.piece != EOS) & (self.piece != ANY), -torch.inf)
            log_probs[..., BREAK].masked_fill_((self.piece != BREAK) & (self.piece != ANY), -torch.inf)
        if self.must is not None:
            piece = torch.full_like(self.must, EOS, dtype=torch.long) if self.piece is None else self.piece
            piece = piece.masked_fill(piece == ANY, EOS).unsqueeze(-1)
            kept = log_probs.gather(-1, piece)
            log_probs.masked_fill_(self.must.unsqueeze(-1), -torch.inf).scatter_(-1, piece, kept)


class Lines:
    """The breaks that the hypotheses of a batch have still to make, and the pieces with which they begin."""

    def __init__(self, batch: SourceBatch) -> None:
        self._batch = batch
        self._left: Tensor | None = None
        if batch.lines is not None and max(batch.lines) > 1:
            self._left = torch.tensor(batch.lines, device=batch.source.device).unsqueeze(1) - 1  # (B', N), or (B', 1)
            self._several = self._left > 0  # (B', 1); a single line may be empty
        self._prefix: Tensor | None = None
        if batch.prefixes is not None:
            rows = [torch.tensor(prefix, dtype=torch.long) for prefix in batch.prefixes]
            self._prefix = pad_sequence(rows, batch_first=True, padding_value=PAD).to(batch.source.device)  # (B, P)

    def endings(self, token: Tensor, rows: Tensor, step: int) -> Endings | None:
        """The endings of hypotheses whose last pieces are `token` (B', N), of the segments `rows` (B',).

        `step` counts from 0. None: all pieces may follow. A limit too low for one piece in each line leaves lines
        empty.
        """
        at_limit = step + 1 in self._batch.limits
        left = None if not at_limit and self._left is None else self._batch.limit[rows].unsqueeze(1) - step  # (B', 1)
        if self._left is None:
            must = None if left is None else (left <= 1).expand_as(token)
            if self._batch.lines is not None:
                return Endings(None, must)
            return None if must is None else Endings(torch.full_like(token, ANY), must)
        assert left is not None
        # at the limit itself a hypothesis ends, even without all of its lines
        breaks = self._left.masked_fill(left <= 1, 0)
        must = left <= 2 * breaks + 1  # of each further line a piece and its end
        empty = ((token == BREAK) | (token == BOS)) & self._several
        piece, must = torch.where(breaks > 0, BREAK, EOS).masked_fill(empty & ~must, NEITHER), must.expand_as(token)
        if self._prefix is not None and step < self._prefix.shape[1]:
            given = self._prefix[rows, step].unsqueeze(1)
            piece, must = given.where(given != PAD, piece), must | (given != PAD)
        return Endings(piece, must)

    def follow(self, token: Tensor, parents: Tensor | None = None) -> None:
        """Count breaks among the new pieces `token` (B', N) of hypotheses that continue `parents` (B', N)."""
        if self._left is not None:
            left = self._left if parents is None else self._left.gather(1, parents)
            self._left = left - (token == BREAK).long()

    def keep(self, running: Tensor) -> None:
        """Drop the other segments."""
        if self._left is not None:
            self._left, self._several = self._left[running], self._several[running]
