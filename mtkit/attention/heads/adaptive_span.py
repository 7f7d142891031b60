"""Adaptive span: each head learns how far back it looks; beyond its span keys fade out, and then cost nothing.

Paper: Sukhbaatar, Grave, Bojanowski and Joulin, "Adaptive Attention Span in Transformers", ACL 2019, arXiv 1905.07799,
section 2. A key at distance x has the weight m_z(x) exp(score), made to sum to one, with span z, ramp R and
m_z(x) = clamp((R + z - x) / R, 0, 1). The loss is span_loss times the mean span of the heads, summed over layers, as in
the authors' code; it stands beside the cross-entropy per token. Spans are clamped to [0, max_span] after each update.
Departures: a token sees itself, where the authors' code begins at the one before. Positions are those of the slot,
where the paper adds relative keys. The encoder takes the symmetric form, |i - j| for x. Keys beyond the widest span of
a layer's heads are left out exactly, not in steps of 64. A span of 0 still has its ramp, which is no window of one.
Cost: O(T (z + R)) time and memory for the widest span z of the layer, as it is now; a step costs O(z + R), and keeps as
many keys and values. Training on an accelerator costs as much as with z = max_span, because the host would have to wait
for the device to know z.
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.pattern_attention import PatternAttention, PatternGroup, by_head
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import outputs_of, scores_of, upcast
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import LossWeight, OneOf, Positive, Share, Within
from mtkit.attention.slots import Positions

PER = ("head", "layer")


class AdaptiveSpan(PatternAttention):
    """Softmax attention within a learned span, one for each head or for each layer.

    max_span: the longest span, in positions before the ramp. ramp: positions over which keys fade out behind the span.
    span_init: the spans at first, as a fraction of max_span. span_loss: weight of the training loss, per position of
    span. span_per: whether each head has a span of its own, or the layer one for all.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder", "decoder"})
    paper = "Sukhbaatar et al. 2019, arXiv 1905.07799"
    complexity = "O(T (z + R))"
    growth = 1
    small: ClassVar[dict[str, Any]] = {"max_span": 10, "ramp": 3, "span_init": 0.3}
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"span_per": "layer"}, {"span_init": 0.0}, {"ramp": 5})

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
            beside=self.positions,
        )

    @property
    def by_position(self) -> Positions | None:
        """The ramp, beside the slot."""
        return self.span

    @property
    def groups(self) -> Sequence[PatternGroup]:  # type: ignore[override]
        """All heads over the window that the widest span needs."""
        reach = self.span.reach
        return by_head([Band(reach, reach)] * self.site.heads)

    def sees(self, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
        """m_z(|i - j|) > 0, by head."""
        return self.span.factor((i - j).abs()) > 0.0

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the window, with the logarithm of the ramp added to scores; in training its loss, "span"."""
        attended = super().attend(inputs)
        if self.training:
            attended.losses = {**attended.losses, "span": self.loss_weight * self.span.lengths.mean()}
        return attended

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """m_z exp(score) over its sum, from all pairs."""
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
        heads = outputs_of(weights, v, positions=slot, query_position=i, key_position=i)
        return Attended(self.merge_heads(heads), weights=weights)


class _SpanRamp(Positions):
    """A factor of exp(score) by distance: 1 up to a learned span, then down to 0 over `ramp` positions.

    The span is a learned `fraction` of `longest`, from 0 to 1, one for each of `spans` heads, or one for all. Other
    relative positions `beside` it have their effect as well.
    """

    def __init__(
        self, site: Site, width: int, *, longest: int, ramp: int, start: float, spans: int, beside: Positions | None
    ) -> None:
        super().__init__(site, width)
        self.longest, self.ramp = longest, ramp
        self.fraction = nn.Parameter(torch.full((spans,), float(start)))
        self.some = slice(None)
        self._beside = (beside,)  # not as a part: its weights are those of the attention's own slot
        self._known: tuple[Tensor, tuple[int, int], int] | None = None

    @property
    def on_values(self) -> bool:  # type: ignore[override]
        """Whether what stands beside gives anything."""
        [beside] = self._beside
        return beside is not None and beside.on_values

    def of_heads(self, some: range) -> Positions:
        """With the spans of these heads."""
        group, [beside] = copy(self), self._beside
        group.some = slice(some.start, some.stop) if len(self.fraction) > 1 else slice(None)
        group._beside = (None if beside is None else beside.of_heads(some),)
        return group

    @property
    def lengths(self) -> Tensor:
        """The spans z, (H or 1,), in positions. Whatever the fractions are, a token sees itself, and z <= `longest`."""
        return (upcast(self.fraction)[self.some] * self.longest).clamp(min=1 - self.ramp, max=self.longest)

    @property
    def reach(self) -> int:
        """The largest distance at which any head sees a key; training on an accelerator takes the largest possible.

        It is read from the device when the fractions have changed, and not in between: a step never waits for it. In
        training they change with every update, and reading them would make the host wait in each.
        """
        here = self.fraction
        if self.training and here.device.type != "cpu":
            return self.longest + self.ramp - 1
        state = here.data_ptr(), here._version
        if self._known is None or self._known[0] is not here or self._known[1] != state:
            with torch.no_grad():  # a graph made in some passes only is one that a checkpoint cannot make again
                widest = float(self.lengths.max().nan_to_num())  # what diverged is reported elsewhere
            self._known = here, state, max(math.ceil(self.ramp + widest) - 1, 0)
        return self._known[2]

    def factor(self, distance: Tensor) -> Tensor:
        """m_z(x) = clamp((R + z - x) / R, 0, 1) of distances (..., T, S): (H or 1, ..., T, S)."""
        z = self.lengths.view(-1, *[1] * distance.dim())
        return ((self.ramp + z - distance) / self.ramp).clamp(0.0, 1.0)

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """log m_z, beside the other bias; beyond the span as low as the type of the queries goes.

        Not infinite: a row of padding may see keys beyond its span alone, and must not become NaN.
        """
        factor = self.factor((query_position.unsqueeze(-1) - key_position.unsqueeze(-2)).abs())
        seen = factor > 0.0
        log = factor.where(seen, 1.0).log().where(seen, torch.finfo(q.dtype).min / 2)
        [beside] = self._beside
        other = None if beside is None else beside.bias(q, query_position, key_position, scale)
        return log if other is None else log + other

    def values(self, weights: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Those of what stands beside."""
        [beside] = self._beside
        return None if beside is None else beside.values(weights, query_position, key_position)

    @torch.no_grad()
    def after_update(self, update: int, total_updates: int) -> None:
        """Clamps the fractions to [0, 1]."""
        self.fraction.clamp_(0.0, 1.0)
