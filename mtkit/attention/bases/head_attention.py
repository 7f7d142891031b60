"""The base of attention over projected heads: projections, slots and cache shapes, without an equation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.contract import Attended, Attention, Inputs, Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.registry import fill
from mtkit.attention.slots import SLOTS, HeadResults, Merge, Nearby, Positions, Projection, Regularizer, Slot, combining
from mtkit.errors import MtkitError


class HeadAttention(Attention):
    """Attention over projected heads: the projections, the slots and their weights; a mechanism adds its equation.

    The weights are `q_proj`, `k_proj`, `v_proj`, `out_proj`, and the parameters of the filled slots.
    """

    slots = combining(*SLOTS)
    mixes = True

    def __init__(self, site: Site, projection: Projection | None = None) -> None:
        """`projection` is given by a mechanism that has its own and does not take that slot."""
        super().__init__(site)
        self.projection: Projection = projection or fill("projection", site) or Projection(site)
        queries, keys, values = self.projection.widths
        memory_width = site.memory_width or site.d_model
        self.q_proj = nn.Linear(site.d_model, queries)
        self.k_proj = nn.Linear(memory_width, keys)
        self.v_proj = nn.Linear(memory_width, values)
        self.out_proj = nn.Linear(self.projection.joined_width, site.d_model)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.projection.initialize(self.q_proj, self.k_proj)
        widths = self.projection.key_width, self.projection.value_width
        self.positions: Positions | None = fill("positions", site, *widths)
        self.merge: Merge | None = fill("merge", site, self.projection.value_width)
        self.regularizer: Regularizer | None = fill("regularizer", site)
        self.nearby: Nearby | None = fill("nearby", site)
        if self.regularizer is not None:
            self.learns_by_steps = False
            if self.regularizer.reads_marks:
                self.reads_marks = True
            if self.regularizer.needs_weights and not self.weights:
                raise MtkitError("this regularizer reads attention weights, but its mechanism has none")

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.projection.scale

    @property
    def dropout(self) -> float:
        """The dropout rate of attention weights; 0 outside training."""
        return self.site.dropout if self.training else 0.0

    @property
    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """The (heads, width) of the keys and values that a cache holds per token."""
        p = self.projection
        return {"keys": (p.key_heads, p.key_width), "values": (p.value_heads, p.value_width)}

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, K), rotated for `position` (T,), 0 to T - 1 if None."""
        return self._rotated(self.projection.queries(self.q_proj(query)), position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to keys (B, G, S, K), rotated as the queries are, and values (B, G, S, V)."""
        k, v = self.projected(memory, self.k_proj, self.v_proj)
        return self._rotated(self.projection.keys(k), position), self.projection.values(v)

    def queries_keys_values(self, tokens: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`queries` and `keys_values` of the same tokens."""
        q, k, v = self.projected(tokens, self.q_proj, self.k_proj, self.v_proj)
        q, k = (self._rotated(x, position) for x in (self.projection.queries(q), self.projection.keys(k)))
        return q, k, self.projection.values(v)

    def exact_queries_keys_values(
        self, tokens: Tensor, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`queries_keys_values`, queries and keys in float32 at least: for choices that rounding must not change."""
        return self.exact_queries(tokens, position), *self.exact_keys_values(tokens, position)

    def exact_queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """`queries` in float32 at least."""
        with torch.autocast(query.device.type, enabled=False):
            q = self.projection.queries(self.q_proj(query.type_as(self.q_proj.weight)))
            return upcast(self._rotated(q, position))

    def exact_keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`keys_values`, keys in float32 at least."""
        v = self.projection.values(self.v_proj(memory))
        with torch.autocast(memory.device.type, enabled=False):
            k = self.projection.keys(self.k_proj(memory.type_as(self.k_proj.weight)))
            return upcast(self._rotated(k, position)), v

    def newest_heads(self, tokens: Tensor, position: Tensor | None = None, *, exact: bool = False) -> list[Tensor]:
        """Queries, keys and values (B, N, heads, width) of a step's tokens (B, N, D), at position (1,).

        exact: as `exact_queries_keys_values`.
        """
        rows = tokens.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        heads = (self.exact_queries_keys_values if exact else self.queries_keys_values)(rows, position)
        return [x.squeeze(2).unflatten(0, tokens.shape[:2]) for x in heads]

    def projected(self, tokens: Tensor, *maps: nn.Linear) -> Sequence[Tensor]:
        """The outputs (..., width) of the maps for the same tokens (..., D).

        On a GPU, whose kernels take less time than their start, and in decoding
        (`mtkit.model.decoding_products`), one product computes all of them.
        """
        if tokens.device.type != "cuda" or len(maps) == 1 or any(type(linear) is not nn.Linear for linear in maps):
            return [linear(tokens) for linear in maps]
        weight, bias = torch.cat([linear.weight for linear in maps]), torch.cat([linear.bias for linear in maps])
        return F.linear(tokens, weight, bias).split([linear.out_features for linear in maps], dim=-1)

    def merge_heads(self, heads: Tensor, query: Tensor) -> Tensor:
        """The output (B, T, D) of the layer from the heads' outputs (B, H, T, V).

        query: the vectors that the queries are projected from, B * T of them in the same order: (B, T, D), or (B, N, D)
        in a step whose heads are (B*N, H, 1, V).
        """
        output: Tensor = self.out_proj(self.merged(heads, query))
        return output

    def merged(self, heads: Tensor, query: Tensor) -> Tensor:
        """One vector (B, T, H*V) from the outputs of the heads (B, H, T, V); query as in `merge_heads`."""
        merged: Tensor = self.merge(heads, query) if self.merge is not None else heads.transpose(1, 2).flatten(2)
        return merged

    @property
    def merge_reads_query(self) -> bool:
        """Whether outputs depend on the query because the merge reads it."""
        return self.merge is not None and self.merge.reads_query

    def result(
        self,
        inputs: Inputs,
        heads: Tensor,
        values: Tensor,
        weights: Tensor | None = None,
        visible: Tensor | None = None,
        *,
        carry: Any = None,
        dropout: float = 0.0,
    ) -> Attended:
        """The result for whole sequences from the heads' outputs (B, H, T, V) and the values (B, G, S, V).

        weights and visible: as in `HeadResults`. dropout: rate for the heads' outputs, not for the losses.
        """
        heads = self.with_nearby(heads, values, inputs.query_valid)
        losses = self.losses(inputs, heads, values, weights, visible)
        output = self.merge_heads(F.dropout(heads, dropout) if dropout else heads, inputs.query)
        return Attended(output, carry, weights if inputs.need_weights else None, losses)

    def with_nearby(self, heads: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
        """The heads' outputs (B, H, T, V) with the term of the slot `nearby`, of tokens' values (B, G, T, V)."""
        return heads if self.nearby is None else heads + self.nearby(values, valid).type_as(heads)

    def losses(
        self,
        inputs: Inputs,
        heads: Tensor,
        values: Tensor,
        weights: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The losses of the regularizer, with the shapes of `HeadResults`; none outside training."""
        if self.regularizer is None or not self.training:
            return {}
        losses: dict[str, Tensor] = self.regularizer(HeadResults(inputs, heads, values, weights, visible))
        return losses

    @property
    def regularizes_weights(self) -> bool:
        """Whether this call must compute attention weights for the regularizer."""
        return self.training and self.regularizer is not None and self.regularizer.needs_weights

    @property
    def weighed_heads(self) -> range:
        """The heads whose weights the regularizer reads."""
        count = self.regularizer.weighed_heads if self.regularizer is not None else 0
        return range(self.site.heads if count is None else count)

    def after_update(self, update: int, total_updates: int) -> None:
        """Call `after_update` of the slots; an override calls this as well."""
        for part in self.children():
            if isinstance(part, Slot):
                part.after_update(update, total_updates)

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return what the slots have learned; an override adds its own."""
        slots = [part for part in self.children() if isinstance(part, Slot)]
        return {name: value for slot in slots for name, value in slot.learned_numbers(inputs).items()}

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Take over the projections of `full`, converted by the projection if shapes differ.

        If the state has no weights for the slot `nearby`, its term is zero, so that outputs stay the same.
        """
        super().adopt(self.projection.adopted(full_state, self.state_dict()))
        if self.nearby is not None and full_state:
            prefix = "nearby."
            weights = {key.removeprefix(prefix): value for key, value in full_state.items() if key.startswith(prefix)}
            self.nearby.adopt(weights)

    def adopt_copies(self, full_state: Mapping[str, Tensor], firsts: Mapping[str, str]) -> None:
        """Copy first projections into second ones, by name, if the state has none of their shape."""
        for name, first in firsts.items():
            linear, full = getattr(self, name), full_state.get(f"{name}.weight")
            if full is None or full.shape != linear.weight.shape:
                linear.load_state_dict(getattr(self, first).state_dict())

    def _rotated(self, x: Tensor, position: Tensor | None) -> Tensor:
        if self.positions is None:
            return x
        if position is None:
            position = torch.arange(x.shape[-2], device=x.device)
        return self.positions.rotate(x, position)
