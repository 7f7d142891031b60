"""Attention over a sparse position pattern: all that its mechanisms have in common besides the pattern itself."""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.contract import Attended, State
from mtkit.attention.engines.blocks.pattern import Pattern
from mtkit.attention.engines.blocks.sparse import dense_attend, sparse_attend, visible_pairs
from mtkit.attention.engines.cache.step_cache import append, ring_place, start_cache, written
from mtkit.attention.engines.heads.head_attention import HeadAttention
from mtkit.attention.engines.softmax.dot_product import attend_step
from mtkit.device import to_device


class PatternAttention(HeadAttention):
    """Softmax attention over the keys of `pattern`, which a mechanism sets; `naive` needs its `sees`.

    Weights are formed, T x T, where they are asked for or a regularizer reads them, and only there.
    """

    weights = True
    pattern: Pattern

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """The paper's equation: whether the query at i sees the key at j, padding and future aside."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        need_weights: bool = False,
    ) -> Attended:
        """Softmax over the pattern's keys, in blocks."""
        q = self.queries(query)
        k, v = self.keys_values(query)
        heads, weights = sparse_attend(
            q,
            k,
            v,
            self.pattern,
            scale=self.scale,
            causal=self.site.causal,
            valid=query_valid,
            positions=self.positions,
            dropout=self.dropout,
            need_weights=need_weights or self.regularizes_weights,
        )
        losses = self.losses(heads, v, weights, query_valid)
        return Attended(self.joined(heads), weights=weights if need_weights else None, losses=losses)

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
    ) -> tuple[State, Any]:
        """An empty cache for the keys that later queries may still see."""
        p = self.projection
        shapes = {"keys": (p.key_heads, p.key_width), "values": (p.value_heads, p.value_width)}
        return start_cache(batch_size, hypotheses, self.q_proj.weight, **shapes), None

    def step(
        self, query: Tensor, state: State, *, carry: Any = None, need_weights: bool = False
    ) -> tuple[Attended, State]:
        """The newest token of each hypothesis attends to its own pattern of keys and reads no others."""
        heads, weights, state = self.heads_of_step(query, state, need_weights)
        return Attended(self.joined(heads.transpose(1, 2)), weights=weights), state

    def heads_of_step(
        self, query: Tensor, state: State, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, State]:
        """The heads' outputs (B, N, H, V), the weights (B, H, N, t) if asked for, and the state with the new token."""
        t = state["count"]
        here = torch.full((1,), t, device=query.device) if self.positions is not None else None
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        k, v = self.keys_values(rows, here)
        k, v, q = (x.squeeze(2).unflatten(0, query.shape[:2]) for x in (k, v, self.queries(rows, here)))
        first, window = self.pattern.kept
        state = append(state, window=window, first=first, keys=k, values=v)
        keys, values = (written(state, name, window=window, first=first) for name in ("keys", "values"))
        seen, where = self.pattern.keys(t), None
        if len(seen) < keys.shape[3]:
            index = to_device(torch.tensor([ring_place(position, window, first) for position in seen]), query.device)
            keys, values = keys.index_select(3, index), values.index_select(3, index)
        elif here is not None or need_weights:  # all that is kept, in the order of its places
            seen = sorted(seen, key=lambda position: ring_place(position, window, first))
        if here is not None or need_weights:  # else nobody asks which positions they are
            where = to_device(torch.tensor(list(seen)), query.device)
        heads, weights = attend_step(
            q, keys, values, scale=self.scale, positions=self.positions, query_position=t, key_position=where
        )
        if where is None or not need_weights:
            return heads, None, state
        return heads, weights.new_zeros(*weights.shape[:3], t + 1).index_copy(-1, where, weights), state

    def naive(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        **_: Any,
    ) -> Attended:
        """The same through all pairs of positions and a mask."""
        i = torch.arange(query.shape[1], device=query.device)
        visible = visible_pairs(self.sees(i.unsqueeze(-1), i), self.site.causal, query_valid)
        k, v = self.keys_values(query)
        heads, weights = dense_attend(self.queries(query), k, v, visible, self.scale, self.positions)
        return Attended(self.joined(heads), weights=weights)
