"""BP-Transformer: k spans per level and side, twice as long at each level, represent all positions around a token.

Paper: Ye, Guo, Gan, Qiu and Zhang, "BP-Transformer: Modelling Long-Range Context via Binary Partitioning", 2019, arXiv
1911.04070, section 3.
A span is a node: it reads the tokens it covers. Tokens read themselves and the spans of the layer below
(`_binary_partition` defines which). Spans start as zeros and are carried from layer to layer, with residual, norm and
feed-forward. A vector for each (level, side, slot) is added to the keys, one table for all heads.
Departures: spans share the tokens' projections, but have their own norms and feed-forward; norms follow the residual as
in the paper. The last layer of a run does not update spans, because nothing reads them. Everything that a span reads
has the same label, which cancels in its softmax and is not computed. Spans that are rebuilt in each layer (bp_memory
"local") are an extension: tokens then read what the spans have read in the same layer.
Cost: O(T k log(T / k)) for tokens and O(T log T) for spans. A step reads O(k log t) keys; the spans that end with it
cost O(log t) amortised, O(t) at worst.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, start_cache
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import (
    attend_step,
    expand_heads,
    safe_softmax,
    scores_of,
    step_rows,
    upcast,
    weighted,
)
from mtkit.attention.kernels.fused import fused_attention
from mtkit.attention.kernels.listed import LabelScores, attend_listed
from mtkit.attention.options import Natural, OneOf, Positive
from mtkit.attention.slots import WITHOUT_SCORES
from mtkit.attention.sparse._binary_partition import (
    count,
    finished,
    finishing_order,
    label_of,
    labels_of,
    left_walk,
    right_walk,
    token_lists,
    top,
)
from mtkit.attention.sparse._node_update import NodeUpdate
from mtkit.device import to_device

MEMORIES = ("carry", "local")
TOGETHER = 4
"""Levels whose spans read a chunk of tokens in one product: tokens are read once, not once per level."""


class Bp(HeadAttention):
    """Softmax attention over a binary partition: near tokens one by one, far ones by spans.

    bp_k: nodes per level and side. bp_labels: whether keys have a vector for their level, side and slot. bp_clip: the
    level from which all labels are the same. bp_memory: spans are carried from layer to layer ("carry") or rebuilt in
    each by a learned query ("local").
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Ye et al. 2019, arXiv 1911.04070"
    complexity = "O(T k log T)"
    growth = 1
    mixes = False
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = WITHOUT_SCORES
    small: ClassVar[dict[str, Any]] = {"bp_k": 3, "bp_clip": 2}
    variants = ({"bp_memory": "local"}, {"bp_k": 1})

    def __init__(
        self,
        site: Site,
        *,
        bp_k: Positive = 4,
        bp_clip: Natural = 3,
        bp_labels: bool = True,
        bp_memory: Annotated[str, OneOf(MEMORIES)] = "carry",
    ) -> None:
        super().__init__(site)
        self.k, self.clip, self.carries = bp_k, bp_clip, bp_memory == "carry"
        labels = labels_of(bp_k, bp_clip)
        self.labels = nn.Parameter(torch.zeros(labels, self.projection.key_width)) if bp_labels else None
        self.updates = self.carries and site.layer + 1 < site.layers
        if self.updates:
            self.span_update = NodeUpdate(site.d_model)
        if not self.carries:
            self.span_query = nn.Parameter(torch.zeros(site.d_model))  # so that a span starts as the mean of its tokens

    def attend(self, inputs: Inputs) -> Attended:
        """Return the tokens' outputs; carries the spans (B, spans, D), level by level."""
        return self._attended(inputs, literal=False)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same, token by token and span by span, over the nodes of the walks."""
        return self._attended(inputs, literal=True)

    def _attended(self, inputs: Inputs, literal: bool) -> Attended:
        query = inputs.query
        levels = self._levels(query.shape[1])
        # in the decoder no padding precedes a real token
        valid = None if self.site.causal else inputs.query_valid
        read_spans = self._literal_span_rows if literal else self._span_rows
        read_tokens = self._literal_token_rows if literal else self._token_rows
        q, (k, v) = self.queries(query), self._keys_values(query)
        spans = self._from_below(inputs.carry, query, len(query), sum(levels))
        if not self.carries:
            start = self.span_query.expand(len(query), sum(levels), -1)
            seed = self.queries(start[:1]).expand(len(query), -1, -1, -1)
            spans = self.merge_heads(read_spans(seed, k, v, valid), start)
        span_k, span_v = self._keys_values(spans)
        heads = read_tokens(q, torch.cat([k, span_k], 2), torch.cat([v, span_v], 2), valid)
        above = None
        if self.updates:
            above = self.span_update(spans, self.merge_heads(read_spans(self.queries(spans), k, v, valid), spans))
        values = v[:, :: self.site.heads // self.projection.value_heads]
        return self.result(inputs, heads, values, carry=above)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the norms of the labels' vectors, which all heads share."""
        learned = super().learned_numbers(inputs)
        return learned if self.labels is None else learned | {"label vector norm": self.labels.norm(dim=-1)[None]}

    def _levels(self, length: int) -> list[int]:
        """Return the number of spans in each level from 1; in the decoder, without spans that the end cuts."""
        highest = top(length, self.k, causal=self.site.causal)
        return [count(length, level, complete=self.site.causal) for level in range(1, highest + 1)]

    def _from_below(self, carry: Tensor | None, query: Tensor, *shape: int) -> Tensor:
        """Return the spans (*shape, D) as they enter this layer: zero in the first."""
        if self.site.layer and carry is not None:
            return carry
        return query.new_zeros(*shape, query.shape[-1])

    def _keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, S, K), repeated for grouped heads."""
        k, v = self.keys_values(x)
        heads = self.site.heads
        return expand_heads(k, heads), expand_heads(v, heads)

    def _span_rows(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return what the spans q (B, H, spans, K) read from the tokens they cover, (B, H, spans, V)."""
        levels, length = self._levels(k.shape[2]), k.shape[2]
        valid, rows = _all_real(k) if valid is None else valid, [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
        by_level = q.split(levels, dim=2)
        for low in range(0, len(levels), TOGETHER):
            high = min(low + TOGETHER, len(levels))  # levels low + 1 to high, in chunks of 2^high tokens
            chunks = -(-length >> high)
            rest = (chunks << high) - length
            keys, values = (F.pad(x, (0, 0, 0, rest)).unflatten(2, (chunks, -1)) for x in (k, v))
            real = F.pad(valid, (0, rest)).view(len(valid), 1, chunks, 1, -1)
            counts = [chunks << (high - level) for level in range(low + 1, high + 1)]
            padded = [F.pad(x, (0, 0, 0, n - x.shape[2])) for x, n in zip(by_level[low:high], counts, strict=True)]
            queries = torch.cat([x.unflatten(2, (chunks, -1)) for x in padded], 3)  # (B, H, chunks, spans, K)
            read = _read_chunks(queries, keys, values, real & _covered(low, high, q.device), self.scale, self.dropout)
            parts = read.split([n // chunks for n in counts], 3)
            rows += [x.flatten(2, 3)[:, :, :n] for x, n in zip(parts, levels[low:high], strict=True)]
        return torch.cat(rows, dim=2)

    def _token_rows(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return what the tokens q (B, H, T, K) read from k and v (B, H, T + spans, K), in one softmax."""
        length = q.shape[2]
        lists = token_lists(length, self.k, self.clip, self.site.causal, q.device)
        count = labels_of(self.k, self.clip)  # the lists always have labels
        vectors = q.new_zeros(count, q.shape[3]) if self.labels is None else self.labels
        by_label = LabelScores(vectors.unsqueeze(0), vectors.new_zeros(1, count))
        missing = None
        if valid is not None:  # nodes without a real token
            missing = torch.cat([~valid[:, :: 1 << level] for level in range(len(self._levels(length)) + 1)], dim=1)
        return attend_listed(q, k, v, by_label, lists, missing=missing, scale=self.scale, dropout=self.dropout)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return an empty cache for tokens and spans, in the order in which they end."""
        cache = start_cache(inputs.batch_size, inputs.hypotheses, self.q_proj.weight, **self.cache_shapes)
        return {**cache, "tokens": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the nodes of the walk; carries the spans that end with the token, (B, N, spans, D), shortest first."""
        query = inputs.query
        t = state["tokens"]
        q, k, v = self._step_rows(query.unsqueeze(2))
        state = append(state, keys=k[:, :, :, 0], values=v[:, :, :, 0]) | {"tokens": t + 1}
        edges = list(left_walk(t, self.k))
        nodes = [finishing_order(0, t), *(finishing_order(edge.level, edge.place) for edge in edges)]
        rows, keys, values = step_rows(q[:, :, :, 0], *self._picked(state, nodes))
        scores = upcast(scores_of(rows, keys, self.scale))
        if self.labels is not None:
            labels = [0, *(label_of(edge.walked, edge.slot, False, self.k, self.clip) for edge in edges)]
            by_label = rows * self.scale @ self.labels.type_as(rows).T
            scores = scores + by_label.index_select(-1, to_device(torch.tensor(labels), query.device))
        output = self.merge_heads(weighted(safe_softmax(scores, None), values), query).view(query.shape)
        above, state = self._end_spans(query, state, inputs.carry)
        return Attended(output, carry=above), state

    def _end_spans(self, query: Tensor, state: State, carry: Tensor | None) -> tuple[Tensor | None, State]:
        """Return the ended spans for the layer above, and the cache with their keys and values."""
        ending = finished(state["tokens"] - 1)
        if not ending:
            return None, state
        spans = self._from_below(carry, query, *query.shape[:2], ending)
        if not self.carries:
            spans = self._step_read(self.span_query.expand_as(spans), state)
        above = self.span_update(spans, self._step_read(spans, state)) if self.updates else None
        _, k, v = self._step_rows(spans)
        for place in range(ending):
            state = append(state, keys=k[:, :, :, place], values=v[:, :, :, place])
        return above, state

    def _step_read(self, spans: Tensor, state: State) -> Tensor:
        """Return what spans (B, N, spans, D), the i-th of 2^(i + 1) tokens, read from the last tokens."""
        q = self.projection.queries(self.q_proj(spans.flatten(0, 1))).unflatten(0, spans.shape[:2])
        end, most = state["tokens"], spans.shape[2]
        keys, values = self._picked(state, [finishing_order(0, token) for token in range(end - (1 << most), end)])
        rows = []
        for place in range(most):
            leaves = slice((1 << most) - (2 << place), None)
            near = keys[:, :, :, leaves], values[:, :, :, leaves]
            rows.append(attend_step(q[:, :, :, place], *near, scale=self.scale)[0])
        return self.merge_heads(torch.stack(rows, 3).flatten(0, 1), spans).unflatten(0, spans.shape[:2])

    def _picked(self, state: State, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, N, G, nodes, K) of these nodes from the cache."""
        index = to_device(torch.tensor(nodes), state["keys"].device)
        return state["keys"].index_select(3, index), state["values"].index_select(3, index)

    def _step_rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, N, H, S, K) of x (B, N, S, D)."""
        flat = x.flatten(0, 1)
        q, k, v = (rows.unflatten(0, x.shape[:2]) for rows in self.queries_keys_values(flat))
        return q, k, v

    def _literal_span_rows(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        lengths = (_all_real(k) if valid is None else valid).sum(1).expand(len(q)).tolist()
        rows = [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
        place = 0
        for level, spans in enumerate(self._levels(k.shape[2]), start=1):
            for span in range(spans):
                row = v.new_zeros(*q.shape[:2], v.shape[3])
                for segment, length in enumerate(lengths):
                    leaves = slice(span << level, min((span + 1) << level, length))
                    label = 0 if self.labels is None else self.labels[(2 * self.k + 1) * min(level, self.clip)]
                    scores = ((k[segment, :, leaves] + label) * q[segment, :, place, None]).sum(-1) * self.scale
                    row[segment] = (scores.softmax(-1).unsqueeze(-1) * v[segment, :, leaves]).sum(1)
                rows.append(row.unsqueeze(2))
                place += 1
        return torch.cat(rows, 2)

    def _literal_token_rows(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        sizes = [q.shape[2], *self._levels(q.shape[2])]
        rows = torch.zeros_like(q[..., :1]).expand(-1, -1, -1, v.shape[3]).clone()
        for segment, length in enumerate((_all_real(q) if valid is None else valid).sum(1).expand(len(q)).tolist()):
            for i in range(length):
                edges = [(edge, False) for edge in left_walk(i, self.k)]
                if not self.site.causal:
                    after = right_walk(i, self.k, length)
                    edges += [(edge, True) for edge in after if edge.place << edge.level < length]
                nodes = [i, *(sum(sizes[: edge.level]) + edge.place for edge, _ in edges)]
                keys = k[segment, :, nodes]
                if self.labels is not None:
                    labels = [0, *(label_of(e.walked, e.slot, right, self.k, self.clip) for e, right in edges)]
                    keys = keys + self.labels[labels]
                weights = ((keys * q[segment, :, i, None]).sum(-1) * self.scale).softmax(-1)
                rows[segment, :, i] = (weights.unsqueeze(-1) * v[segment, :, nodes]).sum(1)
        return rows


def _read_chunks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, dropout: float) -> Tensor:
    """Return what spans q (B, H, chunks, R, K) read from the tokens of their chunk, k and v (B, H, chunks, L, K).

    seen is (B or 1, 1, chunks, R, L). A span that sees nothing gets zero.
    """
    some = seen.any(-1, keepdim=True)
    mask = seen | ~some  # some kernels return NaN for a row without keys
    mask = mask.flatten(0, 1) if len(mask) == 1 else mask.expand(-1, q.shape[1], -1, -1, -1).flatten(0, 1)
    rows = fused_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask=mask, scale=scale, dropout=dropout)
    return rows.unflatten(0, q.shape[:2]) * some


def _covered(low: int, high: int, device: torch.device) -> Tensor:
    """Return which of 2^high tokens the spans of levels low + 1 to high cover, (spans, tokens)."""
    token = torch.arange(1 << high, device=device)
    spans = [torch.arange(1 << (high - level), device=device) for level in range(low + 1, high + 1)]
    levels = enumerate(spans, start=low + 1)
    return torch.cat([(token >> level) == span.unsqueeze(-1) for level, span in levels])


def _all_real(x: Tensor) -> Tensor:
    """Return a mask (1, T) of only real tokens for x (B, H, T, K)."""
    return x.new_ones(1, x.shape[2], dtype=torch.bool)
