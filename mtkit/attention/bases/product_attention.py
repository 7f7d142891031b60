"""The base of attention by scaled dot products over all keys: fused kernels, and caches that hypotheses share.

Equation: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762, equation 1. A mechanism may limit
the keys of a query by `seen`, and by the `valid` of `newest`.
Cost: O(T S) time. Memory is O(T) with the fused kernel, O(T S) if weights are requested. A step costs O(N t) for each
of up to 16 hypotheses, which share one cache (O(t) if `attend_cached` computes it), and O(t) if there are more.

The hypotheses of a segment share its rows (`mtkit.attention.bases.shared_rows`): one product computes the scores of all
rows, and rows of other hypotheses are masked.
"""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.pattern_attention import HeadGroup
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.bases.shared_rows import append_rows, has_one_row_per_position, is_fixed, start_rows, with_room_for
from mtkit.attention.contract import Attended, Beginning, Inputs, State, packing
from mtkit.attention.kernels.cached_rows import attend_cached, cached_is_faster, supports_cached
from mtkit.attention.kernels.dot_product import attend, is_plain, numbers, position_of, safe_softmax
from mtkit.attention.kernels.gpu.short import project_and_attend, projects_short
from mtkit.attention.slots import Projection

MAX_SHARING = 16
"""Maximum number of hypotheses that share a cache: each computes scores for the rows of all."""


class ProductAttention(ScoreAttention):
    """Scaled dot-product attention over all keys that a query may see."""

    transposed = False
    cache_type: torch.dtype | None = None
    """The type of keys and values that a state holds, if not the one in which they are computed."""

    def pairs(
        self, query: Tensor, memory: Tensor | None = None, valid: Tensor | None = None, task: Tensor | None = None
    ) -> Pairs:
        """Compute the pairs of a forward pass; queries, keys and values of the same tokens by `queries_keys_values`."""
        if memory is not None:
            return super().pairs(query, memory, valid, task)
        q, keys, values = self.queries_keys_values(query)
        position = numbers(0, query.shape[1], query.device)
        return Pairs(q, {"keys": keys, "values": values}, position, position, valid, self.site.causal, task)

    def attend(self, inputs: Inputs) -> Attended:
        """Attend; training over few keys on a GPU has kernels for all from the tokens to the heads."""
        maps, valid = (self.q_proj, self.k_proj, self.v_proj), self.seen(inputs)
        filled = (self.positions, self.regularizer, self.nearby)
        has_plain_heads = filled == (None, None, None) and type(self.projection) is Projection
        by_key = valid is None or valid.dim() == 2
        if not (self.training and has_plain_heads and by_key) or self.dropout or inputs.need_weights:
            return super().attend(inputs)
        if not projects_short(inputs.query, inputs.memory, maps, self.site.heads):
            return super().attend(inputs)
        causal = self.site.causal
        heads = project_and_attend(
            inputs.query, inputs.memory, maps, None if causal else valid, heads=self.site.heads, causal=causal
        )
        return Attended(self.merge_heads(heads, inputs.query))

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """softmax(Q K^T / sqrt(K)) V over the visible keys: one kernel for a whole sequence, another for a step."""
        q, keys, values, visible = pairs.q, pairs.keys, pairs.values, pairs.visible
        if pairs.state is None:
            heads, weights = attend(
                q,
                keys,
                values,
                scale=self.scale,
                causal=pairs.causal,
                valid=pairs.valid,
                positions=self.positions,
                dropout=self.dropout,
                need_weights=need_weights,
            )
            return heads, weights, None
        queries = q.shape[2]
        hidden = 1 if visible is None or visible.shape[2] == 1 else queries  # each hypothesis sees its own past
        only_output = is_plain(self.positions) and not need_weights
        if not (only_output and supports_cached(q, keys, values) and cached_is_faster(q, keys, queries, hidden)):
            columns = {name: x.type_as(q) for name, x in pairs.columns.items()}
            return super().attended(pairs._replace(columns=columns), carry, need_weights)
        heads = attend_cached(
            q.transpose(1, 2),
            keys.unsqueeze(1),
            values.unsqueeze(1),
            scale=self.scale,
            visible=None if visible is None else visible.transpose(1, 2),
        )
        return heads.transpose(1, 2), None, None

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return an empty cache for all hypotheses of a segment; in the cross role the projected source."""
        like = self.q_proj.weight.new_empty(0, dtype=self.cache_type)
        if inputs.memory is None:
            return start_rows(inputs.batch_size, inputs.hypotheses, like, **self.cache_shapes), None
        state, carry = super().begin(inputs)
        if self.cache_type is not None:
            for name in self.cache_shapes:
                state["shared"][name] = state["shared"][name].to(self.cache_type)
        return state, carry

    def newest(self, query: Tensor, state: State) -> tuple[Pairs, State]:
        """Return the pairs of a step with query (B, N, D), N queries of one segment, and the state with their rows.

        Keys are the M rows written so far; `valid` is (B, N, M), or None if there is one row per position.
        `key_position` is correct only if the positions slot reads it. More than `MAX_SHARING` hypotheses get one cache
        each from the step in which they start or branch off from a common past.
        """
        if "seen" in state and query.shape[1] > MAX_SHARING and has_one_row_per_position(state):
            state = _separate_caches(state, query.shape[1])
        if "seen" not in state:
            return super().newest(query, state)
        here = position_of(state["count"], query.device)
        q, k, v = self.queries_keys_values(query, here)
        state = append_rows(state, keys=k, values=v)
        shared, rows = state["shared"], None if is_fixed(state) else state["rows"]
        # positions of the first segment; the batch may be empty by now
        positions = here if self.positions is None else shared["position"][:1, :rows].sum(0)
        columns = {name: shared[name][:, :, :rows] for name in ("keys", "values")}
        seen = None if has_one_row_per_position(state) else state["seen"][:, :, :rows]
        return Pairs(q, columns, here, positions, seen, state=state, hypotheses=query.shape[1]), state

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        """Return the state with room for `steps` rows of each hypothesis, hidden until they are written.

        "rows" and "count" are tensors (B, N) in it.
        """
        if "seen" in state and self.keeps_shapes:
            return with_room_for(state, steps)
        return super().fixed_state(state, hypotheses, steps)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend at O(N t) per hypothesis; weights are (B, H, N, t), by position."""
        attended, state = super().advance(inputs, state)
        if attended.weights is not None and "seen" in state and not has_one_row_per_position(state):
            weights, seen = attended.weights, state["seen"][:, None, :, : state["rows"]]
            attended.weights = weights[seen.expand_as(weights)].view(*weights.shape[:3], state["count"])
        return attended, state

    def weights_to_regularize(self, pairs: Pairs) -> Tensor | None:
        """Compute the weights of some heads separately: the fused kernel, which returns none, serves all outputs."""
        if len(self.weighed_heads) == self.site.heads:
            return None
        group = HeadGroup(self.weighed_heads, self.site.heads)
        return group.weights(pairs.q, pairs.keys, scale=self.scale, visible=pairs.visible, positions=self.positions)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Equation 1 with the full matrix of scores."""
        return self.literal(inputs)

    def literal(self, inputs: Inputs, seen: Tensor | None = None) -> Attended:
        """The same over the keys that each query sees, (B, T, S); None: over all."""
        valid = inputs.context_valid
        q = self.queries(inputs.query)
        k, v = self.keys_values(inputs.context)
        group = self.site.heads // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(self.site.heads // v.shape[1], 1)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * self.scale
        visible = torch.ones_like(scores, dtype=torch.bool)
        if self.site.causal:
            visible = visible & (j <= i)
        if valid is not None:
            visible = visible & valid[:, None, None, :]
        if seen is not None:
            visible = visible & seen.unsqueeze(1)
        if self.positions is not None:
            bias = self.positions.bias(q, i[:, 0], j, self.scale)
            scores = scores if bias is None else scores + bias
        weights = safe_softmax(scores, visible)
        heads = torch.einsum("bhts,bhsv->bhtv", weights, v)
        if self.positions is not None:
            extra = self.positions.values(weights, i[:, 0], j)
            heads = heads if extra is None else heads + extra
        return Attended(self.merge_heads(heads, inputs.query), weights=weights)


def _separate_caches(state: State, hypotheses: int) -> State:
    """Return one cache per hypothesis (`step_cache`): views of a past that all hypotheses share.

    The cache is full, so that `append` copies it before writing.
    """
    rows = {name: state["shared"][name][:, None, :, : state["rows"]] for name in ("keys", "values")}
    return {**{name: x.expand(-1, hypotheses, -1, -1, -1) for name, x in rows.items()}, "count": state["count"]}
