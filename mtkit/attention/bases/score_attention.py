"""The base of softmax attention over all pairs of queries and keys: a mechanism states only how it differs.

Forward, start, step, weights, losses and slots are inherited. A step calls the same methods as a whole sequence, on
`Pairs` of the same layout, so that a mechanism writes its equation once. It may override, in order of computation:

- `columns`: the tensors kept per key, in a forward pass and in the cache (default: keys and values);
- `scores`: the scores of all pairs (default: scaled products);
- `logits`: the scores with a bias, a mix over heads, or a sum with the carry (default: the scores);
- `weighed`: the weights (default: the softmax of the logits over visible keys);
- `softmax`: the weights from logits, of other forms than a softmax (sigmoid, sink, topk);
- `mixed`: the weights as applied to the values, before dropout (default: the weights).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from mtkit.attention.bases.caches import append, with_room, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, State
from mtkit.attention.kernels.dot_product import (
    by_hypotheses,
    numbers,
    outputs_of,
    position_of,
    scores_of,
    upcast,
    weights_of,
)
from mtkit.attention.slots import Placed
from mtkit.attention.states import counted


class Pairs(NamedTuple):
    """Queries and the keys they may see: (B, T) and (B, S) in a forward pass.

    A step has the same layout. In the decoder role each of the B*N hypotheses is a segment with one query, so B
    is B*N and T is 1; in the cross role, and if hypotheses share their past (`shared_past`), the N hypotheses are the
    queries of their segment.
    """

    q: Tensor
    """(B, H, T, K), or whatever `queries` makes of the tokens, (B, ..., T, width)."""
    columns: Mapping[str, Tensor]
    """(B, G, S, width) by name; G divides H."""
    query_position: Tensor
    """(T,), or (1,) for all queries of a step."""
    key_position: Tensor
    """(S,); positions of a shared past repeat."""
    valid: Tensor | None = None
    """Mask of the real keys, (B, S), or of the keys each query may see, (B, T, S), in a shared past or beyond `causal`;
    None: all."""
    causal: bool = False
    """Whether queries see only the keys up to their own position. False in a step: there are no later keys."""
    task: Tensor | None = None
    """(B,) in a forward pass, as given."""
    state: State | None = None
    """The state that a step returns, which a mechanism may write what it keeps into; None in a forward pass."""
    hypotheses: int = 1
    """N of a step."""

    @property
    def keys(self) -> Tensor:
        """(B, G, S, K)."""
        return self.columns["keys"]

    @property
    def values(self) -> Tensor:
        """(B, G, S, V)."""
        return self.columns["values"]

    @property
    def visible(self) -> Tensor | None:
        """Mask of the keys that each query may see, broadcastable to (B, H, T, S); None if it may see all."""
        triangle = self.query_position.unsqueeze(-1) >= self.key_position if self.causal else None
        if self.valid is not None and self.valid.dim() == 3:
            seen = self.valid.unsqueeze(1)
            return seen if triangle is None else seen & triangle
        return triangle if self.causal or self.valid is None else self.valid[:, None, None]


class ScoreAttention(HeadAttention):
    """Softmax attention over scores of all pairs; its state is the columns of all tokens so far, or of the source."""

    complexity = "O(T²)"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    weights = True
    keeps_shapes = True
    transposed: ClassVar[bool] = True
    """Whether the state holds keys of the source as (B, G, K, S), as which products of a few queries take half the
    time."""

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """The columns of memory (B, S, D) at position (S,): (B, G, S, width) by name, "values" among them."""
        keys, values = self.keys_values(memory, position)
        return {"keys": keys, "values": values}

    def scores(self, pairs: Pairs) -> Tensor:
        """(B, H, T, S), scaled."""
        return scores_of(pairs.q, pairs.keys, self.scale)

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """The logits of the softmax, before the bias of positions, and the carry of the layer.

        `carry` comes from the layer below; None in the first layer of a run.
        """
        return self.scores(pairs), None

    def weighed(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """The weights, zero where keys are hidden, and the carry of the layer."""
        logits, carried = self.logits(pairs, carry)
        return self.softmax(logits, pairs), carried

    def mixed(self, weights: Tensor) -> Tensor:
        """The weights under which values are summed, before dropout; `Attended.weights` are unchanged."""
        return weights

    def attended(self, pairs: Pairs, carry: Any, need_weights: bool) -> tuple[Tensor, Tensor | None, Any]:
        """The heads' outputs (B, H, T, V), the weights (B, H, T, S), which may be None unless needed, and the carry."""
        weights, carried = self.weighed(pairs, carry)
        # scores by position may be the same for segments and hypotheses; dropout is drawn for each
        weights = weights.expand(len(pairs.values), -1, pairs.q.shape[2], -1)
        return self.outputs(self.mixed(weights), pairs), weights, carried

    def weights_to_regularize(self, pairs: Pairs) -> Tensor | None:
        """The weights of only the `weighed_heads` if that is cheaper than weights from `attended`, else None."""
        return None

    def shown(self, pairs: Pairs) -> Tensor | None:
        """Return a mask (T, S) that hides further keys than padding and the future; None if there are none."""
        return None

    def placed(self, pairs: Pairs) -> Placed | None:
        """The slot's relative positions with the positions of the pairs; None if the slot is empty."""
        slot = self.positions
        return None if slot is None else Placed(slot, pairs.query_position, pairs.key_position)

    def with_positions(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """The logits with the bias of positions, in float32 at least; for an override of `softmax`."""
        logits, relative = upcast(logits), self.placed(pairs)
        bias = None if relative is None else relative.bias(pairs.q, self.scale)
        return logits if bias is None else logits + bias

    def softmax(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """The weights from logits and positions, in float32 at least."""
        shown, visible = self.shown(pairs), pairs.visible
        if shown is not None:
            visible = shown if visible is None else shown & visible
        return weights_of(logits, pairs.q, self.placed(pairs), scale=self.scale, visible=visible)

    def outputs(self, weights: Tensor, pairs: Pairs) -> Tensor:
        """The heads' outputs (B, H, T, V): values and position values, summed under weights after dropout."""
        return outputs_of(weights, pairs.values, self.placed(pairs), self.dropout if pairs.state is None else 0.0)

    def seen(self, inputs: Inputs) -> Tensor | None:
        """The `valid` of a forward pass: which keys are real, (B, S), or which each query may see, (B, T, S)."""
        return inputs.context_valid

    def pairs(
        self, query: Tensor, memory: Tensor | None = None, valid: Tensor | None = None, task: Tensor | None = None
    ) -> Pairs:
        """All pairs of a forward pass; valid (B, S) of the keys, which in the self roles are the queries."""
        q, columns = self.queries(query), self.columns(query if memory is None else memory)
        query_position = numbers(0, query.shape[1], query.device)
        key_position = numbers(0, columns["values"].shape[2], query.device)
        return Pairs(q, columns, query_position, key_position, valid, self.site.causal, task)

    def attend(self, inputs: Inputs) -> Attended:
        """Sums of the values under the weights of all pairs."""
        need_weights = inputs.need_weights
        pairs = self.pairs(inputs.query, inputs.memory, self.seen(inputs), inputs.task)
        carry = inputs.carry if self.site.layer else None
        read = self.weights_to_regularize(pairs) if self.regularizes_weights and not need_weights else None
        weighing = need_weights or (self.regularizes_weights and read is None)
        heads, weights, carried = self.attended(pairs, carry, weighing)
        weighed = weights if read is None else read
        return self.result(inputs, heads, pairs.values, weighed, self.shown(pairs), carry=carried)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """An empty cache; in the cross role the columns of the source, shared by all hypotheses."""
        if inputs.memory is None:
            return {"count": 0}, None
        # contiguous with heads first, as the products of each step would copy them otherwise
        columns = {name: self._turned(name, x).contiguous() for name, x in self.columns(inputs.memory).items()}
        return {"shared": {**columns, "valid": inputs.memory_valid}, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same for the newest token of each hypothesis; O(t), O(S) in the cross role."""
        pairs, state = self.newest(inputs.query, state)
        carry = inputs.carry if self.site.layer else None
        heads, weights, carried = self.attended(pairs, carry, inputs.need_weights)
        heads = by_hypotheses(heads, pairs.hypotheses)
        weights = None if weights is None or not inputs.need_weights else by_hypotheses(weights, pairs.hypotheses)
        return Attended(self.merge_heads(heads, inputs.query), carried, weights), state

    def newest(self, query: Tensor, state: State) -> tuple[Pairs, State]:
        """The pairs of a step with query (B, N, D), and their state: the one given with the newest tokens added."""
        count, hypotheses = state["count"], query.shape[1]
        here = position_of(count, query.device)
        if self.site.role == "cross":
            shared = state["shared"]
            q, valid = self.queries(query), shared["valid"]
            columns = {name: self._turned(name, x) for name, x in shared.items() if name != "valid"}
            state = {**state, "count": count + 1}
        else:
            token, valid = query.flatten(0, 1).unsqueeze(1), None  # (B*N, 1, D): a segment of one token each
            q, columns = self.queries(token, here), self.columns(token, here)
            rows = {name: x.squeeze(2).unflatten(0, query.shape[:2]) for name, x in columns.items()}
            state = append(state, **rows)
            columns = {name: written(state, name).flatten(0, 1) for name in rows}
        key_position = numbers(0, columns["values"].shape[2], query.device)
        if isinstance(count, Tensor) and self.site.role != "cross":
            valid = (key_position <= here).expand(len(columns["values"]), -1)
        return Pairs(q, columns, here, key_position, valid, state=state, hypotheses=hypotheses), state

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        """Return the state with room for `steps` more tokens, and its count as a tensor (B, N)."""
        if not self.keeps_shapes:
            return None
        if self.site.role != "cross":
            return with_room(state, steps, *(name for name in state if name != "count"))
        return counted(state, hypotheses)

    def _turned(self, name: str, x: Tensor) -> Tensor:
        """The columns (B, G, S, width) of the source as the state holds them, or the other way round."""
        return x.transpose(-1, -2) if self.transposed and name == "keys" else x
