"""The base of mechanisms whose similarity is a product of features, in all roles and in a step.

A mechanism states the features of queries and keys (`features_of`). Sums over keys take the place of a cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.recent_sums import add_recent, fade, fixed_recent, read_recent, start_recent
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import expand_heads, position_of, upcast
from mtkit.attention.kernels.feature_sums import (
    Gates,
    Keys,
    attend_all,
    attend_causal,
    attend_parts,
    guarded,
    masked,
    normalised,
    nowhere,
    paired,
    read,
    sums_of,
)
from mtkit.attention.slots import OWN_VECTORS, Projection, combining

PART = 512
"""Positions of a longer memory whose features are computed at once if a key has more features than numbers."""


class FeatureAttention(HeadAttention):
    """phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)) over real keys j, in a decoder j <= i.

    `features` is their number M. `eps` is added to the denominator. `floor` is the minimum size of the denominator
    relative to the largest scale of a key; with `per_key`, for features without a scale, relative to the number of
    visible keys, or to the sum of what gates leave of them (which then add what they forget, added = 1 - e^kept).
    `chunk` is the number of positions computed at once in the decoder role.
    """

    sequential_operations = "O(1)"
    longest_path = "O(1)"
    keeps_shapes = True
    # other positions add to scores, which do not exist here
    slots = combining("merge", "nearby", positions={"rotary"}, projection=OWN_VECTORS, regularizer={"disagreement"})

    def __init__(
        self,
        site: Site,
        projection: Projection | None = None,
        *,
        eps: float = 0.0,
        floor: float = 0.0,
        per_key: bool = False,
        chunk: int,
    ) -> None:
        super().__init__(site, projection)
        self.eps, self.floor, self.per_key = eps, floor, per_key
        self.chunk = chunk

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """The features of queries or keys x (..., T, K), in float32 at least, with their log scale if they have one.

        Either all keys of a decoder have a scale or none has; the scale of a query cancels. `parameters` are the
        `feature_parameters` of the head of x, (..., X, Y) each.
        """
        raise NotImplementedError

    def looped_features(self, x: Tensor) -> Keys | None:
        """The features of x (B, H or G, T, K) by a compiled loop; None if there is none for them."""
        return None

    def weights_of_loop(self) -> NDArray[np.float32]:
        """Return the directions as the loop of `looped_features` reads them; decoding keeps them until they change."""
        raise NotImplementedError

    @property
    def feature_parameters(self) -> Sequence[Tensor]:
        """The parameters of the features per head, (key heads, X, Y) each, which get gradients."""
        return ()

    cache_type: torch.dtype | None = None
    """The type of recent rows of features and values that a state holds, if not float32."""

    gated: bool = False
    """Whether the decoder role has gates."""

    def gates_of(self, query: Tensor) -> Gates | None:
        """The gates (B, G, T, 1) by which the sums forget and add at tokens (B, T, D); None: sums keep and add all.

        Only the decoder role has gates, if `gated`.
        """
        return None

    @property
    def state_features(self) -> tuple[int, bool]:
        """The number of features M, and whether they have a scale."""
        raise NotImplementedError

    def attend(self, inputs: Inputs) -> Attended:
        """The equation of the class, in time and memory linear in T and S."""
        query = inputs.query
        q = self.queries(query)
        if self.site.causal:
            k, v = self.keys_values(query)
            gates = self.gates_of(query)
            heads = attend_causal(
                q,
                k,
                v,
                self.features_of,
                parameters=self.feature_parameters,
                gates=gates,
                valid=inputs.query_valid,
                chunk=self.chunk,
                **self._guards(lambda: _counts_so_far(query) if gates is None else -gates.kept.cumsum(-2).expm1()),
            )
        else:
            context, valid = inputs.context, inputs.context_valid
            guards = self._guards(lambda: _counts(context, valid))
            k, v = self.keys_values(context)
            if max(query.shape[1], context.shape[1]) <= PART or self.state_features[0] <= k.shape[-1]:
                phi_k = self._features_of_keys(k, valid)
                heads = attend_all(self._features(q).features, phi_k, v, **guards)
            else:
                parameters = self.feature_parameters
                heads = attend_parts(
                    q, k, v, self.features_of, parameters=parameters, valid=valid, chunk=PART, **guards
                )
        return self.result(inputs, heads, v, dropout=self.dropout)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Sums over no tokens; in the cross role those over the source, shared by all hypotheses."""
        batch_size, memory, hypotheses = inputs.batch_size, inputs.memory, inputs.hypotheses
        if memory is not None:
            shared: State = {"sums": sums_of(*self._keys(memory, inputs.memory_valid))}
            shared |= {"keys": _counts(memory, inputs.memory_valid)} if self.per_key else {}
            return {"shared": shared, "count": 0}, None
        p, (features, scaled) = self.projection, self.state_features
        groups, like = max(p.key_heads, p.value_heads), upcast(self.q_proj.weight)
        recent = start_recent(
            batch_size,
            hypotheses,
            like.new_empty(0, dtype=self.cache_type),
            groups=groups,
            features=features,
            width=p.value_width + 1,
            fading=scaled or self.gated,
        )
        state: State = {"recent": recent, "count": 0}
        if self.per_key:  # the number of keys so far, or what gates leave of it
            state["keys"] = like.new_zeros(batch_size, hypotheses, groups, 1)
        return state, None

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        if "recent" in state:
            state = {**state, "recent": fixed_recent(state["recent"], scaled=self.state_features[1])}
        return super().fixed_state(state, hypotheses, steps)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same equation for the newest token of each hypothesis; O(M V) per head, at any position."""
        query, after = inputs.query, {**state, "count": state["count"] + 1}
        here = position_of(state["count"], query.device)
        if "shared" in state:
            phi_q = self._features(self.queries(query, here)).features
            guards = self._guards(lambda: state["shared"]["keys"])
            return Attended(self.merge_heads(read(phi_q, state["shared"]["sums"], like=query, **guards), query)), after
        q, (k, v) = self.queries(query, here), self.keys_values(query, here)
        own, keys = self._features_of_both(q, k)
        gates, recent = self.gates_of(query), state["recent"]
        with torch.autocast(query.device.type, enabled=False):
            features, v1, scale = paired(keys, v)
            if gates is not None:
                recent, features = fade(recent, gates.kept), features * gates.added
            recent = add_recent(recent, features, v1, scale)
            rows = upcast(own.features).unflatten(1, (features.shape[1], -1))  # (B, G, R, N, M)
            total = read_recent(recent, rows, scaled=scale is not None)
            guards = self._guards(lambda: _one_more(state["keys"].transpose(1, 2), gates).unsqueeze(2))
            heads = normalised(total, **guards).flatten(1, 2).type_as(query)
        return Attended(self.merge_heads(heads, query)), {**after, "recent": recent}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The whole matrix of similarities phi(q_i) . phi(k_j), scales and gates multiplied in, normalised by rows."""
        valid = inputs.context_valid
        k, v = self.keys_values(inputs.context)
        own, other = self._features(self.queries(inputs.query)), self._features(k)
        phi_q, phi_k = (x.features if x.scale is None else x.features * x.scale.exp() for x in (own, other))
        similarity = torch.einsum("bhtm,bhsm->bhts", phi_q, expand_heads(phi_k, self.site.heads))
        visible = torch.ones_like(similarity, dtype=torch.bool)
        if self.site.causal:
            visible = visible.tril()
        if valid is not None:
            visible = visible & valid[:, None, None, :]
        counted = visible.type_as(similarity)
        scales = None if other.scale is None else expand_heads(other.scale, self.site.heads).transpose(-1, -2)
        gates = self.gates_of(inputs.query) if self.site.causal else None
        if gates is not None:  # the product of e^kept over all positions after the key's, up to the query's
            kept, added = (expand_heads(x, self.site.heads) for x in gates)
            faded = kept.cumsum(-2)
            faded = (faded - faded.transpose(-1, -2)).masked_fill(~visible, 0.0)
            left = faded.exp() * added.transpose(-1, -2)
            similarity, counted = similarity * left, counted * left
            scales = faded if scales is None else scales + faded
        similarity = similarity.masked_fill(~visible, 0.0)
        floor: Tensor | float = self._guards(lambda: counted.sum(-1, keepdim=True))["floor"]
        if scales is not None:  # relative to the largest visible key's scale
            largest = scales.masked_fill(~visible, nowhere(scales)).amax(-1, keepdim=True)
            floor = floor * (largest if own.scale is None else own.scale + largest).exp()
        weights = similarity / guarded(similarity.sum(-1, keepdim=True), self.eps, floor)
        return Attended(
            self.merge_heads(torch.einsum("bhts,bhsv->bhtv", weights, expand_heads(v, self.site.heads)), inputs.query)
        )

    def _guards(self, keys: Callable[[], Tensor]) -> dict[str, Any]:
        """The guards of the denominators, for the number of keys in each, (B or 1, G or 1, T or 1, 1)."""
        # where nothing is to be seen the floor is above zero, so that the result is zero; so far above that what is
        # divided by it has a gradient in float32, whatever reads the result
        return {"eps": self.eps, "floor": self.floor * keys().clamp(min=1e-20) if self.per_key else self.floor}

    def _keys(self, memory: Tensor, valid: Tensor | None, position: Tensor | None = None) -> tuple[Keys, Tensor]:
        """Features of the keys, zero and of no scale at padding, and values."""
        k, v = self.keys_values(memory, position)
        return self._features_of_keys(k, valid), v

    def _features_of_keys(self, k: Tensor, valid: Tensor | None) -> Keys:
        return masked(self._features(k), None if valid is None else valid[:, None, :, None])

    def _features_of_both(self, q: Tensor, k: Tensor) -> tuple[Keys, Keys]:
        """The features of a step's queries and keys, by one call of the loop if there is one."""
        both = self.looped_features(torch.cat([q, k], 2)) if q.shape == k.shape else None
        if both is None:
            return self._features(q), self._features(k)
        scales = (None, None) if both.scale is None else both.scale.chunk(2, 2)
        of_q, of_k = both.features.chunk(2, 2)
        return Keys(of_q, scales[0]), Keys(of_k, scales[1])

    def _features(self, x: Tensor) -> Keys:
        """The features of x (B, H or G, T, K), each head's with its own parameters."""
        looped = self.looped_features(x)
        if looped is not None:
            return looped
        batch, heads, count = x.shape[:3]
        parameters = [expand_heads(p.unsqueeze(0), heads).squeeze(0) for p in self.feature_parameters]
        if not parameters:
            return self.features_of(x)
        # (H, B T, K): all rows of a head meet its parameters in one product; broadcasting would copy them per segment
        keys = self.features_of(x.transpose(0, 1).flatten(1, 2), *parameters)
        features = keys.features.unflatten(1, (batch, count)).transpose(0, 1)
        return Keys(features, None if keys.scale is None else keys.scale.unflatten(1, (batch, count)).transpose(0, 1))


def _counts(memory: Tensor, valid: Tensor | None) -> Tensor:
    """The number of real keys in each segment (B, 1, 1, 1)."""
    if valid is None:
        valid = memory.new_ones(memory.shape[:2], dtype=torch.bool)
    return valid.sum(1).type_as(upcast(memory)).view(-1, 1, 1, 1)


def _counts_so_far(tokens: Tensor) -> Tensor:
    """The number of keys up to each real position (1, 1, T, 1); padding is after them all."""
    return torch.arange(1, tokens.shape[1] + 1, device=tokens.device).type_as(upcast(tokens)).view(1, 1, -1, 1)


def _one_more(keys: Tensor, gates: Gates | None) -> Tensor:
    """The number of keys (B, G, N, 1) with the newest, in place."""
    return keys.add_(1.0) if gates is None else keys.mul_(gates.kept.exp()).add_(gates.added)
