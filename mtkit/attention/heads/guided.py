"""Guided attention: a training loss that pulls some heads towards fixed patterns, such as the previous token.

Paper: Deshpande and Narasimhan, "Guiding Attention for Self-Supervised Learning with Transformers", Findings of EMNLP
2020, arXiv 2010.02399, section 3, and the authors' code, which defines the mean squared error and the schedule.
Departures: the loss skips rows of padding, and rows whose target does not exist, is padding or is hidden by the
mechanism (the first token has no previous one, a window may exclude the first token). Separators are the break pieces
of documents; the target of a row is 1/n on each of the n separators that it sees (in the authors' code 1 on each), and
rows that see none are left out. In the decoder no head is guided to the next token. By default each pattern has one
head, so that four heads suffice; the paper guides 6 of 12; 4 of the 6 look at the first token.
Cost: in training the weights of the guided heads, O(T S) each, also in mechanisms with a lower cost of their own; the
patterns themselves are never formed. Nothing at inference.
"""

from typing import Annotated

import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.marks import separators
from mtkit.attention.options import CountsOf, LossWeight, Natural, Null, OneOf, counts, refused
from mtkit.attention.slots import HeadResults, Regularizer

PATTERNS = {"self": 0, "next": 1, "prev": -1, "first": None}
"""Distance of each pattern's target from the query; None: the first token is the target of all queries."""
SEPARATOR = "separator"
"""The pattern whose targets are the separators that a query sees."""
REDUCTION = ("mse", "row")
DECAY = ("linear", "none")


class Guided(Regularizer):
    """A loss that pulls the attention weights of the first heads towards fixed patterns.

    patterns: how many heads each pattern guides, from the first head on: self, next, prev, first token and separator
    (the breaks between the sentences of a document). weight: weight of the loss. reduction: the squares of a row are
    averaged over the keys of its segment (mse) or summed (row).
    hold: updates at full weight, with linear decay only. decay: with linear, the weight then falls to 0 at the last
    update; with none, it stays.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Deshpande and Narasimhan 2020, arXiv 2010.02399"
    factor: Tensor

    def __init__(
        self,
        site: Site,
        *,
        patterns: Annotated[
            Annotated[str, CountsOf((*PATTERNS, SEPARATOR))] | None,
            Null("next:1,prev:1,first:1 in the encoder and prev:1,first:1 in the decoder"),
        ] = None,
        weight: LossWeight = 10.0,
        reduction: Annotated[str, OneOf(REDUCTION)] = "mse",
        hold: Natural = 20_000,
        decay: Annotated[str, OneOf(DECAY)] = "linear",
    ) -> None:
        super().__init__(site)
        if patterns is None:
            ahead = {} if site.causal else {"next": 1}
            self.guides = dict(list({**ahead, "prev": 1, "first": 1}.items())[: site.heads])
        else:
            self.guides = counts(patterns)
        if site.causal and "next" in self.guides:
            raise refused("patterns", patterns, "guide no head to the next token in the decoder role")
        self.guided = self.weighed_heads = sum(self.guides.values())
        if self.guided > site.heads:
            raise refused("patterns", patterns, f"guide at most all {site.heads} heads")
        self.reads_marks = SEPARATOR in self.guides
        self.weight = weight
        self.needs_weights = weight > 0
        self.by_row = reduction == "row"
        self.hold = hold
        self.decays = decay == "linear"
        self.register_buffer("factor", torch.ones(()))  # saved for resumed runs

    def after_update(self, update: int, total_updates: int) -> None:
        """Set the weight of the next update: full up to `hold`, then falling to 0."""
        left = (total_updates - update) / max(1, total_updates - self.hold)
        self.factor.fill_(min(1.0, max(0.0, left)) if self.decays else 1.0)

    def forward(self, results: HeadResults) -> dict[str, Tensor]:
        """Return {"guided": weight * the sum over the patterns of means over heads and real rows}; layers add up."""
        inputs, weights, visible = results.inputs, results.weights, results.visible
        if weights is None or not self.needs_weights:
            return {}
        batch, _, length, _ = weights.shape
        position = torch.arange(length, device=weights.device)
        real = inputs.query_valid
        if real is None:
            real = position.new_ones(batch, length, dtype=torch.bool)
        shown = None if visible is None else visible.expand(batch, self.guided, -1, -1)
        total, first = weights.new_zeros(()), 0
        for name, count in self.guides.items():
            of_pattern = weights[:, first : first + count]
            seen = None if shown is None else shown[:, first : first + count]
            first += count
            if name == SEPARATOR:
                row, counted = self._separator_rows(upcast(of_pattern), real, seen, inputs.context_marks)
                total = total + self._mean(row, counted, real)
                continue
            offset = PATTERNS[name]
            target = position * 0 if offset is None else position + offset
            clamped = target.clamp(0, length - 1)
            counted = (real & real[:, clamped] & (target == clamped)).unsqueeze(1).expand(-1, count, -1)
            index = clamped.view(1, 1, -1, 1).expand(batch, count, -1, -1)
            if seen is not None:
                counted = counted & seen.gather(-1, index).squeeze(-1)
            total = total + self._mean(_distance(upcast(of_pattern), index), counted, real)
        return {"guided": self.weight * self.factor * total}

    def _mean(self, row: Tensor, counted: Tensor, real: Tensor) -> Tensor:
        """Return the mean of squared distances (B, h, T) over the rows that are counted."""
        if not self.by_row:
            row = row / real.sum(1).clamp(min=1).view(-1, 1, 1)
        return row.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)

    def _separator_rows(
        self, weights: Tensor, real: Tensor, shown: Tensor | None, marks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return squared distances (B, h, T) of weights (B, h, T, S) from 1/n on n separators, and which rows count."""
        keys = torch.zeros_like(real) if marks is None else separators(marks) & real
        targets = keys[:, None, None].expand_as(weights)
        if self.site.causal:
            targets = targets.tril()
        if shown is not None:
            targets = targets & shown
        number = targets.sum(-1)
        some = number > 0
        share = 1 / number.clamp(min=1).type_as(weights)
        on_targets = (weights * targets).sum(-1)
        return weights.square().sum(-1) - 2 * share * on_targets + share * some, some & real.unsqueeze(1)


def _distance(weights: Tensor, index: Tensor) -> Tensor:
    """Return the squared distance (B, h, T) of each row of weights (B, h, T, S) from one-hot at index (B, h, T, 1)."""
    target_weight = weights.gather(-1, index).squeeze(-1)
    return weights.square().sum(-1) - target_weight.square() + (1 - target_weight).square()
