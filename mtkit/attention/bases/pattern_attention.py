"""The base of attention over sparse position patterns; a mechanism adds the patterns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.head_groups import HeadGroup, PatternGroup, together
from mtkit.attention.contract import Attended, Beginning, Inputs, State, packing
from mtkit.attention.kernels.sparse import dense_attend, visible_pairs
from mtkit.attention.slots import Positions


class PatternAttention(HeadAttention):
    """Softmax attention over the keys of position patterns, one for all heads or one for each.

    A mechanism sets `groups` (`by_head`); `naive` needs its `sees`. Where the pattern depends on the lengths of the
    segments, it overrides `groups_of` and `seen_by` instead. The T x T weights are formed only on request or for a
    regularizer.
    """

    weights = True
    groups: Sequence[PatternGroup]

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """The paper's equation: whether the query at i sees the key at j, padding and future aside.

        (H, ...) where heads differ.
        """
        raise NotImplementedError

    @property
    def by_position(self) -> Positions | None:
        """What changes scores and outputs by position: the slot, unless a mechanism adds to it."""
        return self.positions

    def groups_of(self, lengths: Tensor) -> Sequence[PatternGroup]:
        """The groups for segments whose keys are `lengths` (B or 1,) real ones."""
        return self.groups

    def seen_by(self, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
        """`sees` in segments of such lengths, (B or 1, H or 1, ...) where they matter."""
        return self.sees(i, j)

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the pattern's keys, in blocks."""
        k, v = self.keys_values(inputs.context)
        valid = inputs.context_valid
        q = self.queries(inputs.query)
        heads, weights = self.attended(q, k, v, valid=valid, need_weights=inputs.need_weights)
        read = self.weights_to_regularize(q, k, valid) if self.regularizes_weights else (None, None)
        losses = self.losses(heads, v, read[0], inputs.query_valid, inputs.memory_valid, read[1])
        return Attended(self.joined(heads), weights=weights, losses=losses)

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
            for group in self.groups_of(lengths_of(k, valid))
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
        return Attended(self.joined(heads.transpose(1, 2)), weights=weights), state

    def heads_of_step(
        self, query: Tensor, state: State, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, State]:
        """The heads' outputs (B, N, H, V), the weights (B, H, N, t) if asked for, and the state with the new token."""
        t = state["count"]
        here = torch.full((1,), t, device=query.device) if self.positions is not None else None
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        own = [x.squeeze(2).unflatten(0, query.shape[:2]) for x in self.queries_keys_values(rows, here)]
        outputs, states = [], []
        for group, before in zip(self.groups, state["groups"], strict=True):
            heads, weights, after = group.step(
                before,
                *group.of(*own, axis=2),
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
        return Attended(self.joined(heads), weights=weights)

    def _visible(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor:
        """Which keys each query sees, broadcastable to (B, H, T, S)."""
        i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        seen = self.seen_by(i.unsqueeze(-1), j, lengths_of(k, valid))
        return visible_pairs(seen, self.site.causal, valid)


def lengths_of(keys: Tensor, valid: Tensor | None) -> Tensor:
    """The number of real keys in each segment, (B,) of valid (B, S); (1,) where all of keys (B, G, S, K) are."""
    return torch.tensor([keys.shape[2]], device=keys.device) if valid is None else valid.sum(1)
