"""Base of softmax attention over sparse position patterns, whose heads may form groups; a mechanism adds the patterns.

Neighbouring heads form a group; the groups of a layer may differ in pattern, width or attention. A group reads its
share of the layer's queries, keys and values, and has its own cache, which holds the keys that later queries of its
heads can still see.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.caches import append, picked, ring_place, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, State, packing
from mtkit.attention.kernels.dot_product import (
    attend,
    attend_step,
    attend_visible,
    is_plain,
    placed,
    scores_of,
    weights_of,
)
from mtkit.attention.kernels.pattern import Pattern, Rows
from mtkit.attention.kernels.picked_blocks import block_size, keys_of_block
from mtkit.attention.kernels.sparse import dense_attend, sparse_attend, visible_pairs
from mtkit.attention.slots import Positions
from mtkit.device import to_device

SHORT = 128
"""Largest number of keys for which all heads share one masked product.

Up to it, the product is faster than blocks if heads differ in pattern, and up to 20% slower if they do not.
"""


@dataclass(frozen=True)
class HeadGroup:
    """A range of neighbouring heads among the `heads` of a layer.

    Its queries, keys and values are a share of all heads' (`of`), or are made only for it, with any width.
    Heads of a group may share keys.
    """

    some: range
    heads: int

    def rows(self, shared: int) -> Sequence[int]:
        """The rows that the group reads among `shared` ones; neighbouring heads share a row."""
        share = self.heads // shared
        first, last = self.some.start // share, (self.some.stop - 1) // share
        if first == last or not (self.some.start % share or self.some.stop % share):
            return range(first, last + 1)
        return [head // share for head in self.some]

    def of(self, *all_heads: Tensor, axis: int = 1) -> list[Tensor]:
        """Its share of queries, keys or values of all heads, along `axis`: views, unless its border splits a row."""
        return [self._share(x, axis) for x in all_heads]

    def _share(self, x: Tensor, axis: int) -> Tensor:
        rows = self.rows(x.shape[axis])
        if isinstance(rows, range):
            if len(rows) == x.shape[axis]:  # autograd would copy the gradient of a part
                return x
            return x.narrow(axis, rows.start, len(rows))
        return x.index_select(axis, to_device(torch.tensor(rows), x.device))

    def weights(
        self, q: Tensor, k: Tensor, *, scale: float, visible: Tensor | None, positions: Positions | None
    ) -> Tensor:
        """Its weights (B, h, T, S) from the q (B, H, T, K) and k (B, G, S, K) of all heads.

        visible broadcasts to the weights; positions are for all heads.
        """
        q, k = self.of(q, k)
        relative = placed(None if positions is None else positions.of_heads(self.some), q, k)
        return weights_of(scores_of(q, k, scale), q, relative, scale=scale, visible=visible)

    def start(self, batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
        """An empty cache for its share of rows that are, for all heads, of (heads, width)."""
        group_shapes = {name: (len(self.rows(heads)), width) for name, (heads, width) in shapes.items()}
        return start_cache(batch_size, hypotheses, like, **group_shapes)


@dataclass(frozen=True)
class PatternGroup(HeadGroup):
    """A group of heads over the keys of one pattern."""

    pattern: Pattern

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        valid: Tensor | None = None,
        positions: Positions | None = None,
        dropout: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs (B, h, T, V), and the weights (B, h, T, T) if asked for.

        Its own q (B, h, T, K), k (B, g, T, K), v (B, g, T, V); positions are for all heads.
        """
        return sparse_attend(
            q,
            k,
            v,
            self.pattern,
            scale=scale,
            causal=causal,
            valid=valid,
            positions=None if positions is None else positions.of_heads(self.some),
            dropout=dropout,
            need_weights=need_weights,
        )

    def step(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        positions: Positions | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, State]:
        """The newest token reads only the keys of its pattern.

        Its own q (B, N, h, K), k (B, N, g, K), v (B, N, g, V). Outputs (B, N, h, V), the weights (B, h, N, t) if asked
        for, and the state with the new token.
        """
        t = state["count"]
        first, window = self.pattern.kept
        state = append(state, window=window, first=first, keys=k, values=v)
        keys, values = (written(state, name, window=window, first=first) for name in ("keys", "values"))
        with_positions = positions is not None or need_weights  # otherwise positions are not needed
        where, place, visible = self._seen(t, keys.shape[3], with_positions, q.device)
        if place is not None:
            keys, values = (picked(x, place) for x in (keys, values))
        heads, weights = attend_step(
            q,
            keys,
            values,
            scale=scale,
            visible=visible,
            positions=None if positions is None else positions.of_heads(self.some),
            query_position=t,
            key_position=where,
            need_weights=need_weights,
        )
        if where is None or weights is None:
            return heads, None, state
        by_position = weights.new_zeros(*weights.shape[:3], t + 1)
        return heads, by_position.scatter_add(-1, where.unsqueeze(-2).expand_as(weights), weights), state

    def _seen(self, t: int, kept: int, asked: bool, device: torch.device) -> tuple[Tensor | None, ...]:
        """Return what the query at t sees: positions, if asked for, their places in the cache, and which of them count.

        The first two are (L,), or (1, h, L) if heads differ, the last is (1, 1, 1 or h, L). Without places all
        `kept` rows of the cache are seen, in the order of their places.
        """
        size = block_size(self.pattern)
        if size is not None and not any(isinstance(member, Rows) for member in self.pattern.members):
            keys = keys_of_block(self.pattern, size, t // size, device)  # whole blocks, so that no key was given up
            if keys is None:
                return torch.arange(t + 1, device=device) if asked else None, None, None
            position, exists = (x if x.dim() == 1 else x.unsqueeze(0) for x in keys)
            place = position.clamp(0, t)
            return place, place, (exists & (position <= t)).view(1, 1, -1, place.shape[-1])
        first, window = self.pattern.kept
        seen, visible = self.pattern.keys(range(t, t + 1), t + 1), None
        longest = max(len(positions) for positions in seen)
        if len(seen) > 1:  # a list for each head, filled up with the newest token
            exists = torch.arange(longest) < torch.tensor([[len(positions)] for positions in seen])
            visible = to_device(exists.view(1, 1, *exists.shape), device)
            seen = [[*positions, *[t] * (longest - len(positions))] for positions in seen]
        if len(seen) > 1 or longest < kept:
            index = _on([[ring_place(position, window, first) for position in positions] for positions in seen], device)
            return _on(seen, device) if asked else None, index, visible
        by_place = sorted(seen[0], key=lambda position: ring_place(position, window, first)) if asked else []
        return _on([by_place], device) if asked else None, None, visible


def _on(lists: Sequence[Collection[int]], device: torch.device) -> Tensor:
    """Lists of positions or places as a tensor: (L,) if one serves all heads, else (1, h, L)."""
    index = to_device(torch.tensor([list(positions) for positions in lists], dtype=torch.long), device)
    return index.squeeze(0) if len(lists) == 1 else index.unsqueeze(0)


def by_head(patterns: Sequence[Pattern]) -> list[PatternGroup]:
    """The groups of heads for one pattern per head; neighbouring heads of equal patterns form one group."""
    groups: list[PatternGroup] = []
    for pattern, alike in groupby(patterns):
        first = groups[-1].some.stop if groups else 0
        groups.append(PatternGroup(range(first, first + len(list(alike))), len(patterns), pattern))
    return groups


def together(outputs: Sequence[tuple[Tensor, Tensor | None]], axis: int) -> tuple[Tensor, Tensor | None]:
    """The outputs of all head groups, along `axis`, and their weights (B, H, ...) if they have any."""
    if len(outputs) == 1:
        return outputs[0]
    weights = [part_weights for _, part_weights in outputs if part_weights is not None]
    return torch.cat([heads for heads, _ in outputs], axis), torch.cat(weights, 1) if weights else None


class PatternAttention(HeadAttention):
    """Softmax attention over the keys of position patterns, one for all heads or one for each.

    A mechanism sets `groups` (`by_head`), or overrides `groups_of` if patterns depend on the lengths of the segments.
    The T x T weights are computed only on request or for a regularizer.
    """

    sequential_operations = "O(1)"
    weights = True
    groups: Sequence[PatternGroup]

    @property
    def by_position(self) -> Positions | None:
        """Positions that change scores and outputs: the slot, unless a mechanism adds to it."""
        return self.positions

    def groups_of(self, lengths: Tensor) -> Sequence[PatternGroup]:
        """The groups for segments whose keys are `lengths` (B or 1,) real ones."""
        return self.groups

    def sees(self, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
        """Return which keys at j the queries at i see, padding and causality ignored, in segments of these lengths.

        (T, S) of i (T, 1) and j (S,), which count from 0; (B or 1, H, T, S) or (H, T, S) if segments or heads differ.
        """
        groups = self.groups_of(lengths)
        seen = [group.pattern.mask(i, j) for group in groups]
        if len(groups) == 1:
            return seen[0]
        segments = torch.broadcast_shapes(*(x.shape[:-3] for x in seen))
        parts = zip(groups, seen, strict=True)
        return torch.cat([x.expand(*segments, len(group.some), *x.shape[-2:]) for group, x in parts], dim=-3)

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the pattern's keys, in blocks."""
        k, v = self.keys_values(inputs.context)
        valid = inputs.context_valid
        q = self.queries(inputs.query)
        heads, weights = self.attended(q, k, v, valid=valid, need_weights=inputs.need_weights)
        read = self.weights_to_regularize(q, k, valid) if self.regularizes_weights else (None, None)
        attended = self.result(inputs, heads, v, *read)
        attended.weights = weights if inputs.need_weights else None  # some positions have them computed in any case
        return attended

    def weights_to_regularize(self, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights (B, h, T, S) of the `weighed_heads`, and a mask of the keys that these see."""
        group = HeadGroup(self.weighed_heads, self.site.heads)
        visible = self._visible(q, k, valid)
        if visible.dim() > 2 and visible.shape[-3] > 1:
            [visible] = group.of(visible, axis=visible.dim() - 3)
        weights = group.weights(q, k, scale=self.scale, visible=visible, positions=self.by_position)
        return weights, visible

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs (B, H, T, V), and the weights (B, H, T, T) if asked for."""
        length, positions, groups = k.shape[2], self.by_position, self.groups_of(lengths_of(k, valid))
        if all(group.pattern.covers(length, self.site.causal) for group in groups):
            return attend(
                q,
                k,
                v,
                scale=self.scale,
                causal=self.site.causal,
                valid=valid,
                positions=positions,
                dropout=self.dropout,
                need_weights=need_weights,
            )
        if length <= SHORT and is_plain(positions) and not need_weights:
            visible = self._visible(q, k, valid)
            return attend_visible(q, k, v, visible, None, scale=self.scale, dropout=self.dropout), None
        outputs = [
            group.attend(
                *group.of(q, k, v),
                scale=self.scale,
                causal=self.site.causal,
                valid=valid,
                positions=self.by_position,
                dropout=self.dropout,
                need_weights=need_weights,
            )
            for group in groups
        ]
        return together(outputs, 1)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Empty caches for the keys that later queries may still see, one for each group of heads."""
        like, shapes = self.q_proj.weight, self.cache_shapes
        groups = [group.start(inputs.batch_size, inputs.hypotheses, like, **shapes) for group in self.groups]
        return {"groups": groups, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The newest token of each hypothesis reads only the keys of its pattern."""
        heads, weights, state = self.heads_of_step(inputs.query, state, inputs.need_weights)
        return Attended(self.merge_heads(heads.transpose(1, 2), inputs.query), weights=weights), state

    def heads_of_step(
        self, query: Tensor, state: State, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, State]:
        """The heads' outputs (B, N, H, V), the weights (B, H, N, t) if asked for, and the state with the new token."""
        t = state["count"]
        here = torch.full((1,), t, device=query.device) if self.positions is not None else None
        projected = self.newest_heads(query, here)
        outputs, states = [], []
        for group, before in zip(self.groups, state["groups"], strict=True):
            heads, weights, after = group.step(
                before,
                *group.of(*projected, axis=2),
                scale=self.scale,
                positions=self.by_position,
                need_weights=need_weights,
            )
            outputs.append((heads, weights))
            states.append(after)
        heads, weights = together(outputs, 2)
        return heads, weights, {**state, "groups": states, "count": t + 1}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same from the scores of all pairs under a mask."""
        k, v = self.keys_values(inputs.context)
        valid = inputs.context_valid
        q = self.queries(inputs.query)
        heads, weights = dense_attend(q, k, v, self._visible(q, k, valid), self.scale, self.by_position)
        return Attended(self.merge_heads(heads, inputs.query), weights=weights)

    def _visible(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor:
        """Return the keys that each query sees, as a mask broadcastable to (B, H, T, S)."""
        i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        seen = self.sees(i.unsqueeze(-1), j, lengths_of(k, valid))
        return visible_pairs(seen, self.site.causal, valid)


def lengths_of(keys: Tensor, valid: Tensor | None) -> Tensor:
    """The number of real keys in each segment, (B,) of valid (B, S); (1,) if all of keys (B, G, S, K) are."""
    return torch.tensor([keys.shape[2]], device=keys.device) if valid is None else valid.sum(1)
