"""Ends of hypotheses: by EOS, and in the joint translation of several lines by a break after each line but the last.

The translation of n joined lines gets exactly n - 1 breaks, so that it can be split into its lines: EOS is forbidden
before the last line, a break within the last line, and both directly after a break. Each line has a limit at which it
ends, so that an endless line takes no room from the others. If lines are missing shortly before the limit of the
segment, the last pieces are the missing breaks and EOS. If a translation's beginning is given, it is forced.

A hypothesis has lost its place if it got a break although the forbidden EOS was likelier, or EOS although the forbidden
break was: it has left out a line of the source, or translated one twice. It is marked as astray. Breaks of a given
beginning do not count, because the search did not choose them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtkit.decoding.contract import SourceBatch
from mtkit.text.tokenizer import BREAK, EOS, PAD

NEITHER, ANY = 0, -1
"""Values of `Endings.piece`: neither EOS nor a break may follow; or both may, as breaks are not counted."""


@dataclass(frozen=True)
class Endings:
    """Limits on the next piece of each hypothesis: whether it may be EOS or a break, and which piece it must be."""

    piece: Tensor | None
    """(B, N): EOS, BREAK, NEITHER or ANY, or the given piece that must follow; None: EOS for all."""
    must: Tensor | None
    """(B, N), True if no other piece than `piece` (for ANY, EOS) may follow; None: others may."""
    doubt: Tensor | None = None
    """(B, N), filled by the search: whether the forbidden one of EOS and break is likelier than the allowed one."""

    @property
    def constant(self) -> bool:
        """Whether they are the same for all hypotheses and steps: no break may follow."""
        return self.piece is None and self.must is None

    def apply(self, log_probs: Tensor) -> None:
        """Set the log-probabilities (B, N, V) of forbidden pieces to -inf, in place, and fill `doubt`."""
        if self.doubt is not None and self.piece is not None:
            end, pause = log_probs[..., EOS], log_probs[..., BREAK]
            self.doubt.copy_(torch.where(self.piece == EOS, pause > end, end > pause))
        if self.piece is None:
            log_probs[..., BREAK] = -torch.inf
        else:
            log_probs[..., EOS].masked_fill_((self.piece != EOS) & (self.piece != ANY), -torch.inf)
            log_probs[..., BREAK].masked_fill_((self.piece != BREAK) & (self.piece != ANY), -torch.inf)
        if self.must is not None:
            piece = torch.full_like(self.must, EOS, dtype=torch.long) if self.piece is None else self.piece
            piece = piece.masked_fill(piece == ANY, EOS).unsqueeze(-1)
            ending_log_probs = log_probs.gather(-1, piece)
            log_probs.masked_fill_(self.must.unsqueeze(-1), -torch.inf).scatter_(-1, piece, ending_log_probs)


class Lines:
    """The lines that the hypotheses of a batch have still to make, and the pieces with which they begin."""

    astray: Tensor

    def __init__(self, batch: SourceBatch) -> None:
        self._batch = batch
        self._doubt: Tensor | None = None
        self._is_given: Tensor | None = None  # (B', 1), whether the next piece is given
        self._limits: Tensor | None = None
        if batch.lines is not None and max(map(len, batch.lines)) > 1:
            self._limits = _padded(batch.lines, batch.source.device)  # (B', M)
            self._last = (self._limits > 0).sum(1, keepdim=True) - 1  # (B', 1), the number of the last line
            self._line = torch.zeros_like(self._last)  # (B', N) or (B', 1), the number of the present line
            self._size = torch.zeros_like(self._last)  # its pieces so far
            self.astray = torch.zeros_like(self._last, dtype=torch.bool)  # (B', N) or (B', 1)
        self._prefix = None if batch.prefixes is None else _padded(batch.prefixes, batch.source.device)  # (B, P)

    @property
    def counts(self) -> bool:
        """Whether hypotheses may be astray: some segments have several lines."""
        return self._limits is not None

    def endings(self, token: Tensor, rows: Tensor, step: int) -> Endings | None:
        """Return the endings of hypotheses whose last pieces are `token` (B', N), of the segments `rows` (B',).

        `step` counts from 0. None: all pieces may follow. A limit too low for one piece in each line leaves lines
        empty.
        """
        at_limit = step + 1 in self._batch.limits
        prefix_piece = self._is_given = None
        if self._prefix is not None and step < self._prefix.shape[1]:
            prefix_piece = self._prefix[rows, step].unsqueeze(1)
            self._is_given = prefix_piece != PAD
        if self._limits is None:
            must = (self._batch.limit[rows] <= step + 1).unsqueeze(1).expand_as(token) if at_limit else None
            usual = ANY if self._batch.lines is None else EOS
            if prefix_piece is not None:
                piece = prefix_piece.where(prefix_piece != PAD, usual).expand_as(token)
                must = prefix_piece != PAD if must is None else must | (prefix_piece != PAD)
                return Endings(piece, must.expand_as(token))
            if usual == EOS:
                return Endings(None, must)
            return None if must is None else Endings(torch.full_like(token, ANY), must)
        left = self._batch.limit[rows].unsqueeze(1) - step  # (B', 1)
        # at the limit itself a hypothesis ends, even without all of its lines
        breaks = (self._last - self._line).masked_fill(left <= 1, 0)
        must = left <= 2 * breaks + 1  # of each further line a piece and its end
        must = must | (self._size + 1 >= self._limits.gather(1, self._line))
        empty = (self._size == 0) & (self._last > 0)  # a single line may be empty
        piece = torch.where(breaks > 0, BREAK, EOS).masked_fill(empty & ~must, NEITHER)
        if prefix_piece is not None:
            piece, must = prefix_piece.where(prefix_piece != PAD, piece), must | (prefix_piece != PAD)
        self._doubt = torch.zeros_like(token, dtype=torch.bool)
        return Endings(piece.expand_as(token), must.expand_as(token), self._doubt)

    def follow(self, token: Tensor, parents: Tensor | None = None) -> None:
        """Count lines and pieces after the new pieces `token` (B', N) of hypotheses that continue `parents` (B', N)."""
        if self._limits is not None:
            self.astray = self.astray_after(token, parents)
            counts = (self._line, self._size)
            line, size = counts if parents is None else (x.gather(1, parents) for x in counts)
            ends = token == BREAK
            # a hypothesis that has ended may make any pieces
            self._line, self._size = (line + ends).minimum(self._last), (size + 1).masked_fill(ends, 0)

    def astray_after(self, token: Tensor, parents: Tensor | None = None) -> Tensor:
        """Return whether hypotheses are astray (B', N) after the new pieces, as in `follow`."""
        assert self._doubt is not None
        states = (self.astray.expand_as(self._doubt), self._doubt)
        astray, doubt = states if parents is None else (x.gather(1, parents) for x in states)
        if self._is_given is not None:
            doubt = doubt & ~self._is_given
        return astray | (doubt & ((token == BREAK) | (token == EOS)))

    def keep(self, running: Tensor) -> None:
        """Drop the other segments."""
        if self._limits is not None:
            self.astray = self.astray[running]
            self._limits, self._last = self._limits[running], self._last[running]
            self._line, self._size = self._line[running], self._size[running]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of numbers as (B, longest), with zeros at the end."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True).to(device)
