"""Beam search: each step extends the `beam` best prefixes of a segment, until `beam` hypotheses have ended.

The rules are fairseq's (Ott et al., 2019, https://github.com/facebookresearch/fairseq, `sequence_generator.py`).
Each step considers the 2 * beam best continuations, so that the beam keeps its width when hypotheses end. An EOS counts
only among the first `beam` continuations. A segment is finished if `beam` hypotheses have ended, or at its own limit:
EOS is forced there. Prefixes are compared by log-probability, ended hypotheses by score. Unlike fairseq, of all that
end at the last step those with the best scores are kept; without a coverage penalty, the best of all is the same.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtkit.attention.states import close_gaps
from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.search.continuations import (
    allowed_log_probs,
    begin,
    best_continuations,
    coverage_penalty,
    forbid_repeats,
    normalised,
    of_parents,
    still_running,
)
from mtkit.decoding.search.endings import Lines
from mtkit.decoding.search.places import Places
from mtkit.decoding.search.terms import RequiredPieces, fewest_missed_first
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS, PAD


def beam_search(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """Return the hypotheses (B, beam) of beam search, best first.

    Of equally good continuations, one of the better hypothesis comes first, then one with a lower id. With required
    terms, hypotheses that lack the fewest are the best.
    """
    with_coverage = settings.coverage_penalty > 0
    prefixes = _Prefixes(batch, with_coverage)
    terms = None if batch.terms is None else RequiredPieces(batch, batch.terms, settings.beam)
    beam = settings.beam if terms is None else terms.width
    ended, lines, places = _Ended(batch, beam, settings.beam), Lines(batch), Places()
    state = begin(model, batch, hypotheses=1)  # one hypothesis suffices: the first step makes several of it
    for step in range(batch.longest):
        batch.check()
        hypotheses = prefixes.token.shape[1]
        logits, state, weights = places.step(model, prefixes.token, state, need_weights=with_coverage)
        if weights is not None:
            prefixes.attention += weights
        forbid = None
        if settings.no_repeat_ngram:
            forbid = partial(forbid_repeats, pieces=prefixes.pieces[..., :step], size=settings.no_repeat_ngram)
        endings = lines.endings(prefixes.token, prefixes.rows, step)
        if terms is None:
            best = best_continuations(logits, prefixes.log_prob, 2 * beam, endings, forbid)
        else:
            log_probs = allowed_log_probs(logits, endings, forbid)
            best = terms.best_continuations(log_probs, prefixes.log_prob, prefixes.rows, step)
        continuations = _Continuations(*best)
        ended.add(continuations, prefixes, batch, step, settings.coverage_penalty, lines)
        parents = prefixes.extend(continuations, beam, step, finished=ended.full(prefixes.rows))
        lines.follow(prefixes.token, parents)
        if terms is not None:
            terms.follow(parents, prefixes.token)
        running = still_running(prefixes.done, step)
        if running is not None and not len(running):
            break
        if running is not None:
            state, parents = close_gaps(state, running), parents[running]
            prefixes.keep(running)
            lines.keep(running)
            places.keep(running)
            if terms is not None:
                terms.keep(running)
        if beam > 1:
            state = places.follow(state, parents, hypotheses)
    finished = ended.hypotheses(settings.length_penalty)
    if batch.terms is not None:
        finished = fewest_missed_first(finished, batch, batch.terms)
    return finished.at(torch.arange(settings.beam, device=finished.scores.device).expand(len(finished.scores), -1))


@dataclass
class _Continuations:
    """The 2 * beam best continuations of each segment, (B', C) each, best first; -inf marks a missing one.

    C is 2 * beam, or N * V if that is less.
    """

    log_prob: Tensor
    parent: Tensor
    token: Tensor


class _Prefixes:
    """The N prefixes of each unfinished segment: one at first, then `beam`, or fewer if there are no more.

    A log-probability of -inf marks a missing one.
    """

    def __init__(self, batch: SourceBatch, with_coverage: bool) -> None:
        size, device = len(batch.limits), batch.source.device
        self.rows = torch.arange(size, device=device)
        """(B',) the indices of the segments in the batch."""
        self.token = torch.full((size, 1), BOS, device=device)
        """(B', N), the last piece."""
        self.pieces = torch.full((size, 1, batch.longest), PAD, device=device)
        """(B', N, L), PAD from the present step on."""
        self.log_prob = torch.zeros(size, 1, device=device)
        """(B', N) float32."""
        self.attention = torch.zeros(size, 1, batch.source.shape[1] if with_coverage else 0, device=device)
        """(B', N, S), each source piece's attention so far; S = 0 without a coverage penalty."""

    @property
    def done(self) -> Tensor:
        """(B',), True if a segment has no prefix left."""
        return self.log_prob.amax(1) == -torch.inf

    def extend(self, continuations: _Continuations, beam: int, step: int, finished: Tensor) -> Tensor:
        """Selects the best continuations that do not end, none in `finished` segments; gives their parents."""
        order = (continuations.token == EOS).byte().argsort(dim=1, stable=True)[:, :beam]
        parents = continuations.parent.gather(1, order)
        self.token = continuations.token.gather(1, order)
        missing = finished[:, None] | (self.token == EOS)  # EOS is among them if there are few pieces to choose from
        self.log_prob = continuations.log_prob.gather(1, order).masked_fill(missing, -torch.inf)
        self.pieces = of_parents(self.pieces, parents)
        self.pieces[..., step] = self.token
        self.attention = of_parents(self.attention, parents)
        return parents

    def keep(self, running: Tensor) -> None:
        """Drops the finished segments."""
        self.rows, self.token, self.pieces = self.rows[running], self.token[running], self.pieces[running]
        self.log_prob, self.attention = self.log_prob[running], self.attention[running]


class _Ended:
    """The ended hypotheses of the batch's segments, in the order in which they ended.

    There are at most 2 * beam - 1: beam - 1 before the last step, and `beam` at it.
    """

    def __init__(self, batch: SourceBatch, beam: int, enough: int) -> None:
        """A segment with `enough` of them, at most `beam`, is finished."""
        size, device = len(batch.limits), batch.source.device
        self.beam, self.enough = beam, enough
        self.count = torch.zeros(size, dtype=torch.long, device=device)
        """(B,) their number."""
        self.pieces = torch.full((size, 2 * beam, batch.longest), PAD, device=device)
        """(B, 2 * beam, L); here and below, what has not ended is written to the last place."""
        self.log_prob = torch.full((size, 2 * beam), -torch.inf, device=device)
        self.coverage = torch.zeros(size, 2 * beam, device=device)
        """(B, 2 * beam), the coverage penalty."""
        self.astray = torch.zeros(size, 2 * beam, dtype=torch.bool, device=device)

    def add(
        self,
        continuations: _Continuations,
        prefixes: _Prefixes,
        batch: SourceBatch,
        step: int,
        coverage_weight: float,
        lines: Lines,
    ) -> None:
        """Adds the hypotheses that end among the first `beam` continuations."""
        beam = self.beam
        log_prob, parent = continuations.log_prob[:, :beam], continuations.parent[:, :beam]
        ends = (continuations.token[:, :beam] == EOS) & (log_prob > -torch.inf)
        rows = prefixes.rows[:, None]
        place = (self.count[rows] + ends.cumsum(1) - 1).masked_fill(~ends, 2 * beam - 1)
        pieces = of_parents(prefixes.pieces, parent)
        pieces[..., step] = EOS
        self.pieces[rows, place] = pieces
        self.log_prob[rows, place] = log_prob
        if lines.counts:
            self.astray[rows, place] = lines.astray_after(continuations.token[:, :beam], parent)
        if coverage_weight:
            attention = of_parents(prefixes.attention, parent)
            self.coverage[rows, place] = coverage_penalty(attention, batch.valid[prefixes.rows], coverage_weight)
        self.count[prefixes.rows] += ends.sum(1)

    def full(self, rows: Tensor) -> Tensor:
        """Return whether enough hypotheses of the segments `rows` (B',) have ended."""
        return self.count[rows] >= self.enough

    def hypotheses(self, alpha: float) -> Hypotheses:
        """Return the ended hypotheses, ranked."""
        pieces, log_probs = self.pieces[:, :-1], self.log_prob[:, :-1]
        scores = normalised(log_probs, (pieces != PAD).sum(-1), alpha) + self.coverage[:, :-1]
        return Hypotheses(pieces, log_probs, scores, self.astray[:, :-1]).ranked()
