"""Beam search: each step extends the `beam` best prefixes of a segment, until `beam` hypotheses have ended.

The rules are those of fairseq (Ott et al., 2019, https://github.com/facebookresearch/fairseq, `sequence_generator.py`).
Each step considers the 2 * beam best continuations, so that the beam keeps its width when hypotheses end. An end counts
only among the first `beam` continuations. A segment is finished with `beam` ended hypotheses or at its own limit, where
EOS is forced. Hypotheses in progress are compared by log-probability, ended ones by score. Unlike fairseq, of all that
end at the last step those with the best scores are kept; without a coverage penalty, the best of all is the same.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from mtkit.attention.contract import close_gaps, reorder
from mtkit.decoding.search.choices import best_continuations, coverage_penalty, forbid_repeats, normalised
from mtkit.decoding.search.contract import Hypotheses, SourceBatch, begin, ending, still_running
from mtkit.model.network import Logits, Model
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS, PAD


def beam_search(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """The hypotheses (B, beam) of beam search, best first.

    Among equally good continuations, that of the better hypothesis comes first, then the one with the lower id.
    """
    beam, with_coverage = settings.beam, settings.coverage_penalty > 0
    alive = _Alive.start(batch, with_coverage)
    ended = _Ended.start(batch, beam)
    state = begin(model, batch, hypotheses=1)  # one hypothesis suffices: the first step makes several of it
    for step in range(batch.longest):
        batch.check()
        logits, state, weights = model.step(alive.token, state, need_weights=with_coverage)
        if weights is not None:
            alive.attention += weights
        found = _continuations(logits, alive, batch, step, settings)
        ended.add(found, alive, batch, step, settings.coverage_penalty)
        parents = alive.go_on(found, beam, step, finished=ended.full(alive.rows))
        running = still_running(alive.done, step)
        if running is not None and not len(running):
            break
        if running is not None:
            state, parents = close_gaps(state, running), parents[running]
            alive.keep(running)
        if beam > 1:
            state = reorder(state, parents)
    return ended.hypotheses(settings.length_penalty)


@dataclass
class _Continuations:
    """The 2 * beam best continuations of each segment, (B', C) each, best first; -inf marks a missing one.

    C is 2 * beam, or N * V where that is less.
    """

    log_prob: Tensor
    parent: Tensor
    token: Tensor


@dataclass
class _Alive:
    """The N prefixes of each unfinished segment: one at first, then `beam`, or fewer if there are no more.

    A dead one has the log-probability -inf.
    """

    rows: Tensor
    """(B',) which segments of the batch they are."""
    token: Tensor
    """(B', N), the last piece."""
    pieces: Tensor
    """(B', N, L), PAD from the present step on."""
    log_prob: Tensor
    """(B', N) float32."""
    attention: Tensor
    """(B', N, S), what each source piece got so far; S = 0 where nobody asks."""

    @classmethod
    def start(cls, batch: SourceBatch, with_coverage: bool) -> Self:
        size, device = len(batch.limits), batch.source.device
        return cls(
            rows=torch.arange(size, device=device),
            token=torch.full((size, 1), BOS, device=device),
            pieces=torch.full((size, 1, batch.longest), PAD, device=device),
            log_prob=torch.zeros(size, 1, device=device),
            attention=torch.zeros(size, 1, batch.source.shape[1] if with_coverage else 0, device=device),
        )

    @property
    def done(self) -> Tensor:
        """(B',), True where no live prefix is left."""
        return self.log_prob.amax(1) == -torch.inf

    def go_on(self, found: _Continuations, beam: int, step: int, finished: Tensor) -> Tensor:
        """Takes the best continuations that do not end, none in `finished` segments; gives their parents."""
        order = (found.token == EOS).byte().argsort(dim=1, stable=True)[:, :beam]
        parents = found.parent.gather(1, order)
        self.token = found.token.gather(1, order)
        dead = finished[:, None] | (self.token == EOS)  # an end is among them where there are few pieces to choose from
        self.log_prob = found.log_prob.gather(1, order).masked_fill(dead, -torch.inf)
        self.pieces = _of_parents(self.pieces, parents)
        self.pieces[..., step] = self.token
        self.attention = _of_parents(self.attention, parents)
        return parents

    def keep(self, running: Tensor) -> None:
        """Drops the segments that have finished."""
        self.rows, self.token, self.pieces = self.rows[running], self.token[running], self.pieces[running]
        self.log_prob, self.attention = self.log_prob[running], self.attention[running]


@dataclass
class _Ended:
    """The ended hypotheses of each segment of the batch, in the order in which they ended.

    They are 2 * beam - 1 at most: beam - 1 before the last step, and `beam` at it.
    """

    count: Tensor
    """(B,) how many there are."""
    pieces: Tensor
    """(B, 2 * beam, L); the last place, here and below, takes what has not ended."""
    log_prob: Tensor
    coverage: Tensor
    """(B, 2 * beam), the coverage penalty."""

    @classmethod
    def start(cls, batch: SourceBatch, beam: int) -> Self:
        size, device = len(batch.limits), batch.source.device
        return cls(
            count=torch.zeros(size, dtype=torch.long, device=device),
            pieces=torch.full((size, 2 * beam, batch.longest), PAD, device=device),
            log_prob=torch.full((size, 2 * beam), -torch.inf, device=device),
            coverage=torch.zeros(size, 2 * beam, device=device),
        )

    def add(self, found: _Continuations, alive: _Alive, batch: SourceBatch, step: int, coverage_weight: float) -> None:
        """Adds the ends among the first `beam` continuations."""
        beam = self.log_prob.shape[1] // 2
        log_prob, parent = found.log_prob[:, :beam], found.parent[:, :beam]
        ends = (found.token[:, :beam] == EOS) & (log_prob > -torch.inf)
        rows = alive.rows[:, None]
        place = (self.count[rows] + ends.cumsum(1) - 1).masked_fill(~ends, 2 * beam - 1)
        pieces = _of_parents(alive.pieces, parent)
        pieces[..., step] = EOS
        self.pieces[rows, place] = pieces
        self.log_prob[rows, place] = log_prob
        if coverage_weight:
            attention = _of_parents(alive.attention, parent)
            self.coverage[rows, place] = coverage_penalty(attention, batch.valid[alive.rows], coverage_weight)
        self.count[alive.rows] += ends.sum(1)

    def full(self, rows: Tensor) -> Tensor:
        """Whether `beam` hypotheses of the segments `rows` (B',) have ended."""
        return self.count[rows] >= self.log_prob.shape[1] // 2

    def hypotheses(self, alpha: float) -> Hypotheses:
        """The `beam` best of the ended hypotheses, ranked."""
        pieces, log_probs, beam = self.pieces[:, :-1], self.log_prob[:, :-1], self.log_prob.shape[1] // 2
        scores = normalised(log_probs, (pieces != PAD).sum(-1), alpha) + self.coverage[:, :-1]
        found = Hypotheses(pieces, log_probs, scores).ranked()
        return Hypotheses(found.pieces[:, :beam], found.log_probs[:, :beam], found.scores[:, :beam])


def _continuations(
    logits: Logits, alive: _Alive, batch: SourceBatch, step: int, settings: DecodingSettings
) -> _Continuations:
    """The best continuations of the hypotheses alive; logits (B', N, V)."""
    forbid = None
    if settings.no_repeat_ngram:
        forbid = partial(forbid_repeats, pieces=alive.pieces[..., :step], size=settings.no_repeat_ngram)
    ends = ending(batch, alive.rows, step)
    return _Continuations(*best_continuations(logits, alive.log_prob, 2 * settings.beam, ends, forbid))


def _of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """values (B', N, X) of the hypotheses that parents (B', N') names, as a new tensor (B', N', X)."""
    return values.gather(1, parents[..., None].expand(-1, -1, values.shape[2]))
