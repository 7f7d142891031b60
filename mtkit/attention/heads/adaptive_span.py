"""Adaptive span: each head learns how far back it looks; beyond its span keys fade out, and then cost nothing.

Paper: Sukhbaatar, Grave, Bojanowski and Joulin, "Adaptive Attention Span in Transformers", ACL 2019, arXiv 1905.07799,
section 2. A key at distance x has the weight m_z(x) exp(score), normalised to sum to one, with span z, ramp R and
m_z(x) = clamp((R + z - x) / R, 0, 1). The loss is span_loss times the mean span of the heads, summed over layers, as in
the authors' code; it is added to the cross-entropy per token. Spans are clamped to [0, max_span] after each update.
Departures: a token sees itself; the authors' code begins at the previous token. Relative positions come from the slot;
the paper adds relative keys. The encoder takes the symmetric form, |i - j| for x. Keys beyond the widest span of a
layer's heads are left out exactly, not in steps of 64. A span of 0 still has its ramp, so it sees more than one token.
Cost: O(T (z + R)) time and memory for the current widest span z of the layer; a step costs O(z + R), and keeps as many
keys and values. Training on an accelerator costs as much as with z = max_span, because reading z would make the host
wait for the device.
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.pattern_attention import PatternAttention, PatternGroup, by_head
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import outputs_of, placed, scores_of, upcast
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import LossWeight, OneOf, Positive, Share, Within
from mtkit.attention.slots import Positions

PER = ("head", "layer")


class AdaptiveSpan(PatternAttention):
    """Softmax attention within a learned span, one for each head or for each layer.

    max_span: the longest span, in positions before the ramp. ramp: positions over which keys fade out beyond the span.
    span_init: initial spans, as a fraction of max_span. span_loss: weight of the training loss, per position of span.
    span_per: whether each head learns its own span ("head"), or the layer one for all ("layer").
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Sukhbaatar et al. 2019, arXiv 1905.07799"
    complexity = "O(T (z + R))"
    growth = 1
    longest_path = "O(T / (z + R))"
    small: ClassVar[dict[str, Any]] = {"max_span": 10, "ramp": 3, "span_init": 0.3}
    variants = ({"span_per": "layer"}, {"span_init": 0.0}, {"ramp": 5})

    def __init__(
        self,
        site: Site,
        *,
        max_span: Positive = 256,
        ramp: Annotated[int, Within(2)] = 32,  # a ramp of 1 has no slope at a span of 0, which could not grow
        span_init: Share = 0.0,
        span_loss: LossWeight = 2e-6,
        span_per: Annotated[str, OneOf(PER)] = "head",
    ) -> None:
        super().__init__(site)
        self.loss_weight = span_loss
        self.span = _SpanRamp(
            site,
            self.projection.key_width,
            longest=max_span,
            ramp=ramp,
            start=span_init,
            spans=site.heads if span_per == "head" else 1,
            slot=self.positions,
        )

    @property
    def by_position(self) -> Positions | None:
        """The ramp, which includes the positions of the slot."""
        return self.span

    @property
    def groups(self) -> Sequence[PatternGroup]:  # type: ignore[override]
        """All heads, over the window that the widest span needs."""
        reach = self.span.reach
        return by_head([Band(reach, reach)] * self.site.heads)

    def sees(self, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
        return self.span.factor((i - j).abs()) > 0.0

    def attend(self, inputs: Inputs) -> Attended:
        """Attend to the window, with the logarithm of the ramp added to scores; adds the loss "span" in training."""
        attended = super().attend(inputs)
        if self.training:
            attended.losses = {**attended.losses, "span": self.loss_weight * self.span.lengths.mean()}
        return attended

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        q, (k, v) = self.queries(query), self.keys_values(query)
        i = torch.arange(query.shape[1], device=query.device)
        scores, slot = scores_of(q, k, self.scale), self.positions
        bias = None if slot is None else slot.bias(q, i, i, self.scale)
        scores = scores if bias is None else scores + bias
        ramp = self.span.factor((i.unsqueeze(-1) - i).abs()) * self._visible(q, k, inputs.query_valid)
        shown = scores.masked_fill(ramp == 0, -torch.inf)
        parts = ramp * (scores - shown.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).masked_fill(ramp == 0, 0.0).exp()
        weights = parts / parts.sum(-1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
        heads = outputs_of(weights, v, placed(slot, q, k))
        return Attended(self.merge_heads(heads, query), weights=weights)


class _SpanRamp(Positions):
    """A factor of exp(score) by distance: 1 up to a learned span, then down to 0 over `ramp` positions.

    The span is a learned `fraction` (0 to 1) of `longest`, one for each of `spans` heads, or one for all. The effects
    of the relative positions `slot` are added.
    """

    def __init__(
        self, site: Site, width: int, *, longest: int, ramp: int, start: float, spans: int, slot: Positions | None
    ) -> None:
        super().__init__(site, width)
        self.longest, self.ramp = longest, ramp
        self.fraction = nn.Parameter(torch.full((spans,), float(start)))
        self.head_slice = slice(None)
        self._slot = (slot,)  # in a tuple, so that it is no sub-module: the attention's slot owns its weights
        self._known: tuple[Tensor, tuple[int, int], int] | None = None

    @property
    def on_values(self) -> bool:  # type: ignore[override]
        """Whether the slot's positions have a term on values."""
        [slot] = self._slot
        return slot is not None and slot.on_values

    def of_heads(self, some: range) -> Positions:
        group, [slot] = copy(self), self._slot
        group.head_slice = slice(some.start, some.stop) if len(self.fraction) > 1 else slice(None)
        group._slot = (None if slot is None else slot.of_heads(some),)
        return group

    @property
    def lengths(self) -> Tensor:
        """Spans z (H or 1,) in positions. Whatever the fractions are, a token sees itself, and z <= `longest`."""
        return (upcast(self.fraction)[self.head_slice] * self.longest).clamp(min=1 - self.ramp, max=self.longest)

    @property
    def reach(self) -> int:
        """Largest distance at which any head sees a key; on an accelerator it may be the largest possible.

        An accelerator's fractions are read only when their version has changed, so that steps never wait for them. A
        write through `.data` changes no version. In training the fractions change with every update, and reading them
        would make the host wait each time; inference tensors have no version.
        """
        fraction = self.fraction
        if fraction.device.type == "cpu":
            return self._read_reach()
        if self.training or fraction.is_inference():
            return self.longest + self.ramp - 1
        state = fraction.data_ptr(), fraction._version
        if self._known is None or self._known[0] is not fraction or self._known[1] != state:
            self._known = fraction, state, self._read_reach()
        return self._known[2]

    @torch.no_grad()  # a checkpoint could not repeat a graph that only some passes make
    def _read_reach(self) -> int:
        widest = float(self.lengths.max().nan_to_num())  # divergence is reported elsewhere
        return max(math.ceil(self.ramp + widest) - 1, 0)

    def factor(self, distance: Tensor) -> Tensor:
        """Return m_z(x) = clamp((R + z - x) / R, 0, 1) of distances (..., T, S): (H or 1, ..., T, S)."""
        z = self.lengths.view(-1, *[1] * distance.dim())
        return ((self.ramp + z - distance) / self.ramp).clamp(0.0, 1.0)

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """Return log m_z plus the slot's bias; beyond the span half the lowest number of the queries' type.

        It is finite, because a row of padding may see only keys beyond its span, and must not become NaN.
        """
        factor = self.factor((query_position.unsqueeze(-1) - key_position.unsqueeze(-2)).abs())
        seen = factor > 0.0
        log = factor.where(seen, 1.0).log().where(seen, torch.finfo(q.dtype).min / 2)
        [slot] = self._slot
        other = None if slot is None else slot.bias(q, query_position, key_position, scale)
        return log if other is None else log + other

    def values(self, weights: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        [slot] = self._slot
        return None if slot is None else slot.values(weights, query_position, key_position)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the span of each head, in positions."""
        return {"span": self.lengths}

    @torch.no_grad()
    def after_update(self, update: int, total_updates: int) -> None:
        self.fraction.clamp_(0.0, 1.0)
