"""Luna: a packed memory of fixed length attends to the tokens, and the tokens attend to the packed memory.

Paper: Ma, Kong, Wang, Zhou, May, Ma and Zettlemoyer, "Luna: Linear Unified Nested Attention", NeurIPS 2021,
arXiv 2106.01540, sections 3.1 to 3.3. In the encoder role, with memory P (l, D):
    Y_P = softmax(P X^T / sqrt(K)) X,  P <- LN(P + Y_P),  Y_X = softmax(X Y_P^T / sqrt(K)) Y_P,
each factor under its projection. The cross role packs the source instead of X; the targets only unpack. In the decoder
role P is fixed, so that no token changes another one's memory. With the activation omega instead of a softmax over
time,
    a_t = omega(x_t P^T / sqrt(K)),  w_t = softmax_l(x_t sum_{j<=t} x_j a_j^T / (t sqrt(K))),
    y_t = w_t sum_{j<=t} a_j x_j^T / t.
Departures: as in the authors' code, the packed memory has no output projection. The decoder's self-attention uses the
same initial memory in all its layers, since the memory packed from the source stays in the cross role; and it reads
all l slots. There is no dropout on P + Y_P, and the norm follows the sum in every layout of the model's norms.
Cost: O((T + S) l K) time, O(T + S) memory. A step costs O(l K) per head and keeps 2 l K sums, at any position.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import add_rows, start_sums
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax, scores_of, upcast
from mtkit.attention.kernels.feature_sums import elu1
from mtkit.attention.kernels.recurrence import Part, prefix_products, recur, triangle_products
from mtkit.attention.kernels.reproducible import seeded_dropout
from mtkit.attention.options import OneOf, Positive
from mtkit.attention.slots import combining
from mtkit.errors import MtkitError


def softplus2(x: Tensor) -> Tensor:
    """Return log2(1 + 2^x)."""
    return F.softplus(x, beta=math.log(2), threshold=40)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"softplus2": softplus2, "elu1": elu1}
MEMORY = ("carry", "local")


class Packed(NamedTuple):
    """The packed memory that is carried to the next layer, or from the encoder to the decoder."""

    slots: Tensor
    """(B, l, D)."""


class Luna(HeadAttention):
    """Attention through a packed memory of fixed length: tokens are packed into its slots, and queries read the slots.

    length: number l of slots. tie_kv: whether keys and values of an attention share one projection. memory: "carry"
    (the packed memory is passed up the layers of a run, and from the encoder to the decoder) or "local" (each layer
    learns its own). activation: omega in the decoder role, "softplus2" (log2(1 + 2^x)) or "elu1" (elu(x) + 1).
    dynamic_length: whether a segment of fewer than l tokens unpacks only as many slots as it has tokens; it has no
    effect in the decoder role. chunk: number of positions computed at once in the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Ma et al. 2021, arXiv 2106.01540"
    complexity = "O(T l)"
    growth = 1
    mixes = False
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    # not em-routing: it multiplies the heads' rounding errors, which no softmax over time bounds in the decoder
    slots = combining("nearby", regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"length": 3, "chunk": 4}
    variants = ({"memory": "local"}, {"activation": "elu1"})

    def __init__(
        self,
        site: Site,
        *,
        length: Positive = 32,
        tie_kv: bool = True,
        memory: Annotated[str, OneOf(MEMORY)] = "carry",
        activation: Annotated[str, OneOf(ACTIVATIONS)] = "softplus2",
        dynamic_length: bool = True,
        chunk: Positive = 64,
    ) -> None:
        super().__init__(site)
        self.activation = ACTIVATIONS[activation]
        self.carries = memory == "carry"
        self.dynamic_length = dynamic_length
        self.chunk = chunk
        width = site.d_model
        projections = ["packed_q_proj"]  # queries of the memory
        if site.causal:
            projections += ["context_proj"]  # keys of the tokens for these queries
        else:
            projections += ["packed_v_proj"] if tie_kv else ["packed_k_proj", "packed_v_proj"]  # of the packed rows
        for name in projections:
            self.add_module(name, xavier_linear(width, width))
        self.tie_kv = tie_kv
        if tie_kv:
            del self.k_proj
        self.packed_norm = nn.LayerNorm(width) if self.carries and not site.causal else None
        owns = site.layer == 0 or not self.carries
        self.seeds = nn.Parameter(_seeds(length, width)) if owns else None

    def attend(self, inputs: Inputs) -> Attended:
        """Pack the tokens, then unpack; in a decoder, each position packs the tokens up to it. Carries the packed
        memory.

        Raises: MtkitError above the first layer if a carried memory is missing.
        """
        query = inputs.query
        if self.site.causal:
            packed = self._memory(len(query), inputs.carry, inputs.memory_carry)
            heads, v = self._causal(query, packed)
            return self.result(inputs, heads, v, carry=self._carried(packed))
        k, v = self.keys_values(inputs.context)
        packed, keys, values, seen = self._packed(inputs, k, v)
        heads, _ = attend(self.queries(query), keys, values, scale=self.scale, valid=seen, dropout=self.dropout)
        return self.result(inputs, heads, v, carry=self._carried(packed))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean weight with which tokens read each slot, in the roles in which slots read all tokens."""
        learned = super().learned_numbers(inputs)
        if inputs is not None and not self.site.causal:
            _, keys, _, seen = self._packed(inputs, *self.keys_values(inputs.context))
            visible = None if seen is None else seen[:, None, None]
            weights = safe_softmax(scores_of(self.queries(inputs.query), keys, self.scale), visible)
            learned["slot use"] = token_means(weights, inputs.query_valid)
        return learned

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the queries of the fixed memory and empty sums; in the cross role the packed source."""
        memory = inputs.memory
        packed = self._memory(inputs.batch_size, inputs.carry, inputs.memory_carry)
        packed_q = self._heads("packed_q_proj", packed)
        if memory is not None:
            k, v = self.keys_values(memory)
            rows, _ = attend(packed_q, k, v, scale=self.scale, valid=inputs.memory_valid)
            packed, keys, values = self._unpacked_rows(packed, rows)
            shared = {"keys": keys, "values": values, "seen": self._seen(packed, memory, inputs.memory_valid)}
            return {"shared": shared}, self._carried(packed)
        return {"shared": {"asks": packed_q}, **start_sums("keys", "values")}, self._carried(packed)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        if "asks" not in state["shared"]:
            shared = state["shared"]
            q, seen = self.queries(query).transpose(1, 2), shared["seen"]
            visible = None if seen is None else seen[:, None, None, :]
            heads, _ = attend_step(q, shared["keys"], shared["values"], scale=self.scale, visible=visible)
            return Attended(self.merge_heads(heads.transpose(1, 2), query)), state
        q, k, v, a = (x.transpose(1, 2) for x in self._tokens(query, state["shared"]["asks"]))  # each (B, N, H, ...)
        with torch.autocast(query.device.type, enabled=False):
            a = a.unsqueeze(-1)
            state = add_rows(state, keys=(a, k.unsqueeze(-2)), values=(a, v.unsqueeze(-2)))  # (B, N, H, l, K)
            keys, values, count = state["keys"], state["values"], state["count"]
            weights = (keys @ (q * (self.scale / count)).unsqueeze(-1)).squeeze(-1).softmax(-1)
            heads = (weights.unsqueeze(-2) @ values).squeeze(-2) / count
        output = self.merge_heads(heads.transpose(1, 2).type_as(query), query)
        return Attended(output), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations of sections 3.1 to 3.3 head by head, in the decoder role also position by position."""
        query = inputs.query
        packed = self._memory(len(query), inputs.carry, inputs.memory_carry)
        if self.site.causal:
            packed_q, outputs = self._heads("packed_q_proj", packed), []
            for position in range(query.shape[1]):
                q, k, v, a = self._tokens(query[:, : position + 1], packed_q)
                factor = self.scale / (position + 1)
                weights = (q[:, :, -1:] @ (k.transpose(-1, -2) @ a) * factor).softmax(-1)  # (B, H, 1, l)
                outputs.append(weights @ (a.transpose(-1, -2) @ v) / (position + 1))
            return Attended(self.merge_heads(torch.cat(outputs, 2).type_as(query), query), carry=self._carried(packed))
        context, valid = inputs.context, inputs.context_valid
        k, v = self.keys_values(context)
        rows = _softmax_attention(self._heads("packed_q_proj", packed), k, v, self.scale, valid)
        packed, keys, values = self._unpacked_rows(packed, rows)
        seen = self._seen(packed, context, valid)
        heads = _softmax_attention(self.queries(query), keys, values, self.scale, seen)
        return Attended(self.merge_heads(heads, query), carry=self._carried(packed))

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map (B, S, D) to keys and values (B, H, S, K), the same tensor if they are tied."""
        v = self.projection.values(self.v_proj(memory))
        return (v if self.tie_kv else self.projection.keys(self.k_proj(memory))), v

    def _memory(self, batch_size: int, carry: Any, memory_carry: Any) -> Tensor:
        """Return the layer's input memory P (B, l, D): carried from below, from an encoder of the same width, or
        learned.
        """
        if self.seeds is None:
            if not isinstance(carry, Packed):
                raise MtkitError("luna with memory=carry needs the packed memory that the layer below it carries up")
            return carry.slots
        width = self.site.d_model
        if self.carries and isinstance(memory_carry, Packed) and memory_carry.slots.shape[-1] == width:
            return memory_carry.slots
        return (self.seeds * math.sqrt(width)).expand(batch_size, -1, -1)

    def _carried(self, packed: Tensor) -> Packed | None:
        return Packed(packed) if self.carries else None

    def _heads(self, projection: str, x: Tensor) -> Tensor:
        return self.projection.queries(self.get_submodule(projection)(x))

    def _packed(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Pack keys and values; return the memory, the keys and values of its slots, and which are unpacked."""
        packed, valid = self._memory(len(inputs.query), inputs.carry, inputs.memory_carry), inputs.context_valid
        rows, _ = attend(
            self._heads("packed_q_proj", packed), k, v, scale=self.scale, valid=valid, dropout=self.dropout
        )
        packed, keys, values = self._unpacked_rows(packed, rows)
        return packed, keys, values, self._seen(packed, inputs.context, valid)

    def _unpacked_rows(self, packed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next layer's memory LN(P + Y_P), and keys and values (B, H, l, K) of Y_P; rows are its heads."""
        y = rows.transpose(1, 2).flatten(2)
        values = self._heads("packed_v_proj", y)
        keys = values if self.tie_kv else self._heads("packed_k_proj", y)
        return packed if self.packed_norm is None else self.packed_norm(packed + y), keys, values

    def _seen(self, packed: Tensor, context: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return which slots (B, l) are unpacked, None for all: at most one per token, and none without tokens."""
        length = packed.shape[1]
        if valid is None:
            if not self.dynamic_length or context.shape[1] >= length:
                return None
            valid = torch.ones(context.shape[:2], dtype=torch.bool, device=context.device)
        tokens = valid.sum(1, keepdim=True)
        if not self.dynamic_length:
            tokens = tokens * length
        return torch.arange(length, device=context.device) < tokens

    def _activations(self, context: Tensor, packed_q: Tensor) -> Tensor:
        """Return a (..., T, l) from tokens (..., T, K) and the memory's queries (..., l, K), in the decoder role."""
        return self.activation((context * self.scale) @ packed_q.transpose(-1, -2))

    def _tokens(self, query: Tensor, packed_q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (B, H, T, K) and a (B, H, T, l) of the tokens in the decoder role, in at least float32."""
        k, v = self.keys_values(query)
        q, k, v, context, packed_q = map(
            upcast, (self.queries(query), k, v, self._heads("context_proj", query), packed_q)
        )
        with torch.autocast(query.device.type, enabled=False):
            return q, k, v, self._activations(context, packed_q)

    def _causal(self, query: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads (B, H, T, K) in the decoder role, and the values."""
        k, v = self.keys_values(query)
        tokens = self.queries(query), k, v, self._heads("context_proj", query)
        packed_q = upcast(self._heads("packed_q_proj", packed)).flatten(0, 1)
        count = torch.arange(1, query.shape[1] + 1, device=packed_q.device, dtype=packed_q.dtype)
        share = 1 / count.unsqueeze(-1)
        dropout, seed = self.dropout, int(torch.randint(1 << 31, ())) if self.dropout else 0

        def step(
            part: Part, sequences: list[Tensor], constants: list[Tensor], state: list[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            q, k, v, context = map(upcast, sequences)
            now = share[part.positions]
            noise = seeded_dropout(dropout, seed + part.positions.start + share.numel() * part.streams.start, q.device)
            a = noise(self._activations(context, *constants))
            if part.is_whole:
                weights = noise(triangle_products(q * (self.scale * now), k, a).softmax(-1))
                return triangle_products(weights, a, v) * now, []
            scores, keys = prefix_products(q * (self.scale * now), k, a, state[0])
            heads, values = prefix_products(noise(scores.softmax(-1)), a, v, state[1])
            return heads * now, [keys, values]

        streams, slots, width = packed_q.shape
        empty = [packed_q.new_zeros(streams, width, slots), packed_q.new_zeros(streams, slots, width)]
        rows = [x.flatten(0, 1) for x in tokens]
        heads, _ = recur(step, rows, empty, constants=[packed_q], chunk=self.chunk)
        return heads.view_as(k).type_as(query), v


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None) -> Tensor:
    """Compute scaled dot-product attention with its matrix of weights, head by head."""
    visible = None if valid is None else valid[:, None, :]
    heads = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    return torch.stack([safe_softmax(a @ b.transpose(-1, -2) * scale, visible) @ c for a, b, c in heads], dim=1)


def _seeds(length: int, width: int) -> Tensor:
    """Return the initial P_0 / sqrt(D); P_0 has unit variance, as embedded tokens have, and sinusoidal positions."""
    noise, channel = torch.randn(length, width), torch.arange(width)
    angle = torch.arange(length).unsqueeze(1) * 10_000.0 ** (-(channel - channel % 2) / width)
    return (noise + torch.where(channel % 2 == 0, angle.sin(), angle.cos())) * width**-0.5
