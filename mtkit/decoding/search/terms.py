"""Beam search for translations with required terms (Post and Vilar, 2018, https://aclanthology.org/N18-1119).

Hypotheses of a segment are grouped into banks by the number of required pieces that they have. In addition to its
likeliest pieces, each hypothesis is continued by the next pieces of its terms. Banks take turns: first the best
continuation of each bank, the fullest bank first, then the second best of each, and so on, until the beam is full. The
beam is wider by the number of required pieces than the beam of other segments, so that no bank starves. A hypothesis
that lacks terms ends only at its limit; there, hypotheses with the fewest missing terms are the best.

As in Hu et al. (2019, https://aclanthology.org/N19-1090) all hypotheses of a batch are computed by the same operations.
Unlike these papers, an occurrence also counts if the model wrote it unprompted. For each term, the longest beginning
of the term with which the hypothesis ends is tracked (Knuth, Morris and Pratt, 1977); a complete term counts if the
next piece does not continue its last word. Occurrences of one term do not overlap; occurrences of different terms may.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mtkit.decoding.contract import Hypotheses, RequiredTerms, SourceBatch, Term
from mtkit.decoding.search.continuations import best, of_parents
from mtkit.text.tokenizer import EOS, PAD

Continued = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities of continuations, their parents and their pieces."""


class RequiredPieces:
    """The required terms of a batch's segments, and how much of them each hypothesis has.

    Shapes: R terms, A spellings of a term, P pieces of a spelling.
    """

    def __init__(self, batch: SourceBatch, required: RequiredTerms, beam: int) -> None:
        device = batch.source.device
        self._limit, self._beam = batch.limit, beam
        self._starts_inside, self._ends_inside = required.starts_inside, required.ends_inside
        segments = [_fitting(terms, limit) for terms, limit in zip(required.of_segments, batch.limits, strict=True)]
        self._forms = _padded_forms(segments).to(device)
        """(B', R, A, P), PAD at the end."""
        sizes = (self._forms != PAD).sum(-1)
        longest = self._forms.shape[-1]
        self._sizes = sizes.masked_fill(sizes == 0, longest + 1)
        """(B', R, A) pieces; more than the longest if there is no such spelling, so that it is never complete."""
        most = self._forms.shape[1]
        counts = [[term.count for term in terms] + [0] * (most - len(terms)) for terms in segments]
        self._need = torch.tensor(counts, device=device)
        """(B', R), the number of occurrences; 0 if there is no such term."""
        self._size = self._sizes.amin(-1)
        """(B', R), the minimum number of pieces."""
        self._total = (self._need * self._size).sum(1, keepdim=True)
        """(B', 1), the number of required pieces."""
        self.width = beam + int(self._total.amax())
        """The maximum number of hypotheses per segment."""
        self._have = torch.zeros_like(self._need).unsqueeze(1)
        """(B', N, R), the number of complete occurrences, at most `_need`."""
        self._begun = torch.zeros_like(self._sizes).unsqueeze(1)
        """(B', N, R, A), the number of pieces in the occurrence that has begun."""
        self._recent = torch.full((len(segments), 1, longest), PAD, device=device)
        """(B', N, P), the last pieces."""

    def best_continuations(self, log_probs: Tensor, prefix: Tensor, rows: Tensor, step: int) -> Continued:
        """Return the continuations of hypotheses by log_probs (B', N, V), in the order in which they fill the beam.

        prefix (B', N) are the hypotheses' log-probabilities, rows (B',) the numbers of the segments. Gives
        log-probabilities, parents and pieces (B', 2 * width), or fewer; -inf marks a missing one.
        """
        lacks = (self._have < self._need.unsqueeze(1)).unsqueeze(-1) & (self._begun < self._sizes.unsqueeze(1))
        forms = self._forms.unsqueeze(1).expand(-1, prefix.shape[1], -1, -1, -1)
        place = self._begun.clamp(max=forms.shape[-1] - 1).unsqueeze(-1)
        following = forms.gather(-1, place).squeeze(-1).masked_fill(~lacks, PAD)
        top = best(log_probs.flatten(0, 1), 2 * self._beam)[1].unflatten(0, prefix.shape)
        end = torch.full_like(prefix, EOS, dtype=torch.long)
        pieces = torch.cat([top, following.flatten(2), forms[..., 0].flatten(2), end[..., None]], 2).sort(2).values
        sums = log_probs.gather(2, pieces) + prefix[..., None]
        sums[..., 1:].masked_fill_(pieces[..., 1:] == pieces[..., :-1], -torch.inf)
        sums, order = (
            sums.nan_to_num(-torch.inf, torch.inf, -torch.inf).flatten(1).sort(dim=1, descending=True, stable=True)
        )
        count = max(int((sums > -torch.inf).sum(1).amax()), 1)  # without those that are missing, often most of them
        sums, order = sums[:, :count], order[:, :count]
        parents, pieces = order // pieces.shape[2], pieces.flatten(1).gather(1, order)
        have, begun = self._after(parents, pieces)
        ends = pieces == EOS
        lacking = (have < self._need.unsqueeze(1)).any(-1) & (self._limit[rows] > step + 1).unsqueeze(1)
        sums = sums.masked_fill(ends & lacking, -torch.inf)
        chosen = self._in_turns(sums, self._banks(have, begun))
        chosen = chosen[:, : 2 * self.width]
        sums, pieces = sums.gather(1, chosen), pieces.gather(1, chosen)
        return self._cut(sums, pieces), parents.gather(1, chosen), pieces

    def follow(self, parents: Tensor, token: Tensor) -> None:
        """Count the new pieces `token` (B', N') of hypotheses that continue `parents` (B', N')."""
        self._have, self._begun = self._after(parents, token)
        self._recent = torch.cat([of_parents(self._recent, parents)[..., 1:], token[..., None]], -1)

    def keep(self, running: Tensor) -> None:
        """Drop the other segments."""
        for name in ("_forms", "_sizes", "_need", "_size", "_total", "_have", "_begun", "_recent"):
            setattr(self, name, getattr(self, name)[running])

    def _after(self, parents: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Occurrences and beginnings, (B', K, R) and (B', K, R, A), after pieces (B', K) of hypotheses `parents`."""
        recent, sizes, forms = self._recent, self._sizes.unsqueeze(1), self._forms.unsqueeze(1)

        def continued(of_hypotheses: Tensor) -> Tensor:
            """(B', N, R, A) to (B', K, R, A)."""
            return of_parents(of_hypotheses.flatten(2), parents).unflatten(2, sizes.shape[2:])

        within_word = self._ends_inside[recent[..., :-1]] & self._starts_inside[recent[..., 1:]]  # (B', N, P - 1)
        goes_on = self._ends_inside[of_parents(recent[..., -1:], parents)] & self._starts_inside[token[..., None]]
        complete = (continued(self._begun == sizes) & ~goes_on[..., None]).any(-1)
        longest, after = forms.shape[-1], token.new_zeros((*token.shape, *sizes.shape[2:]))
        for size in range(1, longest + 1):  # the hypothesis ends with all but the last of these pieces of the term
            begins = (forms[..., : size - 1] == recent[:, :, None, None, longest + 1 - size :]).all(-1)
            begins &= (size <= self._begun + 1) & (size <= sizes)
            if size > 1:
                begins &= ~within_word[..., longest - size, None, None]
            # an occurrence begins with a word, and shares no piece with the one before
            barred = goes_on if size == 1 else complete
            same = continued(begins) & (forms[..., size - 1] == token[..., None, None]) & ~barred[..., None]
            after.masked_fill_(same, size)
        return (of_parents(self._have, parents) + complete).minimum(self._need.unsqueeze(1)), after

    def _banks(self, have: Tensor, begun: Tensor) -> Tensor:
        """Return the number of required pieces that hypotheses have, (B', K)."""
        need, size = self._need.unsqueeze(1), self._size.unsqueeze(1)
        # amin over so few spellings takes ten times as long
        missing = reduce(torch.minimum, (self._sizes.unsqueeze(1) - begun).unbind(-1)).minimum(size)
        return torch.where(have < need, (have + 1) * size - missing, need * size).sum(-1)

    def _in_turns(self, sums: Tensor, banks: Tensor) -> Tensor:
        """Return the order (B', K) in which continuations, sorted by their sums, fill the beam."""
        count, is_missing = int(self._total.amax()) + 1, sums == -torch.inf
        in_banks = one_hot(banks, count).masked_fill(is_missing.unsqueeze(2), 0)
        turn = in_banks.cumsum(1).gather(2, banks.unsqueeze(2)).squeeze(2)
        key = turn * count + self._total - banks
        return key.masked_fill(is_missing, torch.iinfo(key.dtype).max).argsort(dim=1, stable=True)

    def _cut(self, sums: Tensor, pieces: Tensor) -> Tensor:
        """Return the sums, -inf beyond each segment's beam; ended hypotheses take no places from the others."""
        width, ends = self._beam + self._total, pieces == EOS
        place = torch.arange(1, pieces.shape[1] + 1, device=pieces.device).where(ends, (~ends).cumsum(1))
        return sums.masked_fill(place > width, -torch.inf)


def fewest_missed_first(found: Hypotheses, batch: SourceBatch, required: RequiredTerms) -> Hypotheses:
    """Return the hypotheses sorted by the number of terms that they lack; of equal ones, the order stays."""
    missed = torch.zeros_like(found.scores).masked_fill(found.scores == -torch.inf, torch.inf)
    for row, (terms, limit) in enumerate(zip(required.of_segments, batch.limits, strict=True)):
        at_limit = (found.lengths[row] >= limit) & missed[row].isfinite()  # the others have all terms
        for column in at_limit.nonzero().flatten().tolist():
            missed[row, column] = missing(found.pieces[row, column].tolist(), _fitting(terms, limit), required)
    return found.at(missed.argsort(dim=1, stable=True))


def missing(pieces: Sequence[int], terms: Sequence[Term], required: RequiredTerms) -> int:
    """Count the required occurrences that a hypothesis lacks, over all terms."""

    def touches(place: int) -> bool:
        inside = 0 < place < len(pieces)
        return inside and bool(required.ends_inside[pieces[place - 1]] and required.starts_inside[pieces[place]])

    total = 0
    for term in terms:
        count = place = 0
        while place < len(pieces):
            sizes = (len(form) for form in term.forms if tuple(pieces[place : place + len(form)]) == form)
            size = next((size for size in sizes if not touches(place) and not touches(place + size)), 0)
            count, place = count + bool(size), place + (size or 1)
        total += max(0, term.count - count)
    return total


def _fitting(terms: Sequence[Term], limit: int) -> list[Term]:
    """Return the terms, from the first on, that fit into a translation of at most `limit` pieces, EOS counted."""
    fitting, room = [], limit - 1
    for term in terms:
        count = min(term.count, room // min(map(len, term.forms)))
        if count:
            fitting.append(Term(term.forms, count))
            room -= fitting[-1].size
    return fitting


def _padded_forms(segments: Sequence[Sequence[Term]]) -> Tensor:
    """Return the spellings of all terms, (B, R, A, P), with PAD at the end."""
    forms = [form for terms in segments for term in terms for form in term.forms]
    count = max((len(terms) for terms in segments), default=0)
    spellings = max((len(term.forms) for terms in segments for term in terms), default=1)
    padded = torch.full((len(segments), max(count, 1), spellings, max(map(len, forms), default=1)), PAD)
    for row, terms in enumerate(segments):
        for number, term in enumerate(terms):
            for place, form in enumerate(term.forms):
                padded[row, number, place, : len(form)] = torch.tensor(form)
    return padded
