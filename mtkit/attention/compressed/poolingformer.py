"""Poolingformer: a sliding window, and on its output attention to pooled spans of a wider window.

Paper: Zhang, Gong, Shen, Li, Lv, Duan and Chen, "Poolingformer: Long Document Modeling with Pooling Attention", ICML
2021, arXiv 2105.04371, section 3. The first level gives Y, attention within a sliding window; the second level has its
own projections (`pooled`), reads only Y and gives Z; the result is Y + Z.
Departures: windows are given as a radius on each side. A span is seen if all of it is in the wider window. Spans pool
real tokens only. ldconv weighs the tokens of a span by a linear map of its middle token, here without a bias and
starting at zero, which is the mean; if the middle is beyond the end, ldconv takes the mean of the span's tokens. The
decoder role is an extension: windows end at the query's own position, a span is seen from its last position on, and a
query that sees none has Z = 0 before the second output projection. The paper's layers without the second level are
`band`. Relative positions apply to the first level only; each other slot applies to both levels, with its own weights.
The loss of a regularizer is the mean of its losses at both levels.
Cost: O(T (r1 + r2 / stride)). A step costs O(r1 + r2 / stride + kernel), at any position, and keeps as many rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.caches import written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.compressed._spans import (
    Pool,
    Spans,
    append_row,
    kept_spans,
    mean,
    pooled,
    span_lists,
    spans_valid,
    start_spans,
)
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend_step, expand_heads, safe_softmax, scores_of, upcast, weighted
from mtkit.attention.kernels.listed import attend_listed
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import Natural, NaturalByLayer, OneOf, Positive, of_layer, refused
from mtkit.attention.slots import combining
from mtkit.device import to_device

POOLS = ("ldconv", "mean", "max")


class Poolingformer(PatternAttention):
    """A sliding window, plus a second attention to pooled keys and values of the first one's output.

    window_radius: tokens seen on each side by the first level, one number or one per layer. pool_radius: positions on
    each side within which the second level sees spans. pool_kernel: tokens per span. pool_stride: positions from one
    span to the next. pool_type: how a span's keys and values are pooled: by learned weights that depend on its middle
    token ("ldconv"), by their mean ("mean") or by their maximum in each channel ("max").
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder"})
    paper = "Zhang et al. 2021, arXiv 2105.04371"
    complexity = "O(T (r1 + r2 / s))"
    growth = 1
    longest_path = "O(T / (r1 + r2))"
    weights = False
    slots = combining("positions", "projection", "merge", regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"window_radius": 3, "pool_radius": 5, "pool_kernel": 3, "pool_stride": 2}
    variants = ({"pool_type": "mean"}, {"pool_type": "max"}, {"pool_stride": 3}, {"pool_kernel": 4, "pool_stride": 1})

    def __init__(
        self,
        site: Site,
        *,
        window_radius: NaturalByLayer = 64,
        pool_radius: Natural = 256,
        pool_kernel: Positive = 5,
        pool_stride: Positive = 4,
        pool_type: Annotated[str, OneOf(POOLS)] = "ldconv",
    ) -> None:
        super().__init__(site)
        if pool_kernel > pool_radius + 1:
            raise refused("pool_kernel", pool_kernel, "be at most pool_radius + 1, or no span is ever seen")
        if pool_stride > pool_kernel:
            raise refused("pool_stride", pool_stride, "be at most pool_kernel, or tokens between spans are never seen")
        self.radius = of_layer("window_radius", window_radius, site)
        self.groups = by_head([Band(self.radius, self.radius)] * site.heads)
        self.spans, self.pool_radius, self.pool_type = Spans(pool_kernel, pool_stride), pool_radius, pool_type
        self.pooled = HeadAttention(replace(site, positions=None))  # a span has no position of its own
        if pool_type == "ldconv":
            p = self.pooled.projection
            self.key_taps = nn.Parameter(torch.zeros(p.key_heads, p.key_width, pool_kernel))
            self.value_taps = nn.Parameter(torch.zeros(p.value_heads, p.value_width, pool_kernel))

    @property
    def pools(self) -> dict[str, Pool]:
        """Pools that make the keys and values of spans."""
        if self.pool_type == "ldconv":
            return {"keys": partial(_weighed, self.key_taps), "values": partial(_weighed, self.value_taps)}
        pool = mean if self.pool_type == "mean" else _largest
        return {"keys": pool, "values": pool}

    @property
    def most(self) -> int:
        """Number of spans that a causal query can see."""
        return (self.pool_radius + 1 - self.spans.size) // self.spans.stride + 1

    def attend(self, inputs: Inputs) -> Attended:
        """Return Y + Z."""
        query_valid = inputs.query_valid
        first = super().attend(replace(inputs, need_weights=False))
        second, y = self.pooled, first.output
        q, k, v = second.queries_keys_values(y)
        keys, values = (
            pooled(x, self.spans, self.pools[name], query_valid) for name, x in (("keys", k), ("values", v))
        )
        keys, values = (expand_heads(x, q.shape[1]) for x in (keys, values))
        how: dict[str, Any] = {"causal": self.site.causal, "radius": self.pool_radius, "device": q.device}
        lists = span_lists(self.spans, q.shape[2], **how)
        hidden = None if query_valid is None or self.site.causal else ~spans_valid(query_valid, self.spans)
        heads = attend_listed(q, keys, values, None, lists, missing=hidden, scale=second.scale, dropout=self.dropout)
        losses = {name: (loss + first.losses[name]) / 2 for name, loss in second.losses(inputs, heads, v).items()}
        return Attended(y + second.merge_heads(heads, y), losses=losses)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        state, _ = super().begin(inputs)
        second = self.pooled
        like, shapes = second.q_proj.weight, second.cache_shapes
        state["pooled"] = start_spans(inputs.batch_size, inputs.hypotheses, like, **shapes)
        return state, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        second, t = self.pooled, state["count"]
        heads, _, state = self.heads_of_step(inputs.query, state)
        y = self.merge_heads(heads.transpose(1, 2), inputs.query)
        q, k, v = second.newest_heads(y)
        spans = append_row(state["pooled"], self.spans, self.pools, window=self.most, keys=k, values=v)
        keys, values = (written(spans["spans"], name, window=self.most) for name in ("keys", "values"))
        near = [number * self.spans.stride >= t - self.pool_radius for number in kept_spans(spans, self.most)]
        if near:
            visible = None if all(near) else to_device(torch.tensor(near), q.device).view(1, 1, 1, -1)
            heads, _ = attend_step(q, keys, values, scale=second.scale, visible=visible)
        else:
            heads = torch.zeros_like(heads)
        z = second.merge_heads(heads.transpose(1, 2), y)
        return Attended(y + z), {**state, "pooled": spans}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query_valid = inputs.query_valid
        second, y = self.pooled, super().naive(inputs.query, query_valid=query_valid).output
        length, size = inputs.query.shape[1], self.spans.size
        lengths = [length] * len(y) if query_valid is None else query_valid.sum(1).tolist()
        starts = range(0, length, self.spans.stride)
        q, k, v = second.queries_keys_values(y)
        summaries = []
        for x, taps in ((k, getattr(self, "key_taps", None)), (v, getattr(self, "value_taps", None))):
            segments = []
            for rows, n in zip(x, lengths, strict=True):
                spans = [(rows[:, s : min(s + size, n)], rows[:, s + size // 2 : n]) for s in starts]
                segments.append(torch.stack([self._summary(*span, taps) for span in spans], 1))
            summaries.append(torch.stack(segments))
        first = torch.tensor(starts, device=y.device)
        last, i = first + size - 1, torch.arange(length, device=y.device).unsqueeze(-1)
        seen = (i - first <= self.pool_radius) & (last <= (i if self.site.causal else i + self.pool_radius))
        real = first < torch.tensor(lengths, device=y.device).view(-1, 1, 1, 1)
        weights = safe_softmax(scores_of(q, summaries[0], second.scale), seen & real)
        return Attended(y + second.merge_heads(weighted(weights, summaries[1]), y))

    def _summary(self, rows: Tensor, middle: Tensor, taps: Tensor | None) -> Tensor:
        """Return the summary (G, K) of a span's real rows (G, n, K); middle: those from its middle on."""
        if not rows.shape[1]:
            return rows.sum(1)
        if taps is None:
            return rows.mean(1) if self.pool_type == "mean" else rows.amax(1)
        logits = torch.zeros_like(taps[:, 0]) if not middle.shape[1] else torch.einsum("gk,gkt->gt", middle[:, 0], taps)
        return torch.einsum("gt,gtk->gk", logits[:, : rows.shape[1]].softmax(-1), rows)

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Load the projections of `full` into the first level; without weights of its own, the second level starts with
        Z = 0.
        """
        super().adopt(full_state)
        if "pooled.out_proj.weight" not in full_state:
            for parameter in self.pooled.out_proj.parameters():
                nn.init.zeros_(parameter)

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        self.pooled.after_update(update, total_updates)


def _largest(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return the maximum of each channel over the rows that count; zero if none counts."""
    if mask is None:
        return rows.amax(-2)
    largest = rows.masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(-2)
    return largest.masked_fill(~mask.any(-1, keepdim=True), 0.0)


def _weighed(taps: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows (B, G, P, size, K) weighed by a softmax of the middle row times taps (G, K, size), over those in
    `mask`.
    """
    if mask is not None:
        rows = rows.masked_fill(~mask.unsqueeze(-1), 0.0)
    logits = rows[..., rows.shape[-2] // 2, :] @ taps
    shares = safe_softmax(logits, mask)
    return (upcast(rows) * shares.unsqueeze(-1)).sum(-2).type_as(rows)
