"""Random attention: every token sees itself and a few keys that are drawn once and for all.

Paper: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, arXiv 2007.14062, section 2 (its random
part); Lin et al., "A Survey of Transformers", 2021, arXiv 2106.04554, section 4.1.1.
Departures: single keys are drawn, not blocks (`bigbird` draws blocks). A draw is a hash of seed, role, layer, head,
position and slot, so that nothing has to be saved. A key that is drawn twice counts once. The decoder role (an
extension) draws keys up to the query's own. The cross role (an extension) draws source keys; it has no key of its own.
Cost: O(T r). A step costs O(r), at any position, and keeps all tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.caches import picked
from mtkit.attention.bases.pattern_attention import PatternAttention, PatternGroup, by_head, lengths_of
from mtkit.attention.contract import ROLES, Attended, Beginning, Inputs, Site, State
from mtkit.attention.kernels.dot_product import attend_step
from mtkit.attention.kernels.pattern import Blocks
from mtkit.attention.kernels.random_pattern import Random
from mtkit.attention.kernels.reproducible import random_key
from mtkit.attention.options import Positive


class RandomAttention(PatternAttention):
    """Scaled dot-product attention over drawn keys.

    random_keys: number of keys drawn per query, in addition to its own; if there are no more keys, all are seen.
    random_shared_heads: whether all heads see the same keys.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder"})
    paper = "Zaheer et al. 2020, arXiv 2007.14062"
    complexity = "O(T r)"
    growth = 1
    longest_path = "O(log T), decoder O(T / r)"
    small: ClassVar[dict[str, Any]] = {"random_keys": 3}

    def __init__(self, site: Site, *, random_keys: Positive = 32, random_shared_heads: bool = False) -> None:
        super().__init__(site)
        self.count = min(random_keys, max(site.max_length, site.memory_length or 0))  # no segment has more keys
        self.drawing = 1 if random_shared_heads else site.heads
        self.key = random_key(site.seed, ROLES.index(site.role), site.layer)
        self.groups = by_head([Blocks(1) | self.drawn()] * site.heads)

    def drawn(self, lengths: Tensor | None = None) -> Random:
        """The drawn keys: among keys up to the query's own, or among the first `lengths` (B or 1,) of each segment."""
        return Random(self.count, self.drawing, self.key, lengths)

    def groups_of(self, lengths: Tensor) -> Sequence[PatternGroup]:
        """Keys are drawn from the real keys of each segment, in the decoder role from the past."""
        if self.site.causal:
            return self.groups
        drawn = self.drawn(lengths)
        return by_head([drawn if self.site.role == "cross" else Blocks(1) | drawn] * self.site.heads)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        if inputs.memory is None:
            return super().begin(inputs)
        k, v = self.keys_values(inputs.memory)
        lengths = lengths_of(k, inputs.memory_valid).expand(inputs.batch_size)
        return {"shared": {"keys": k, "values": v, "lengths": lengths}, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend only to the keys drawn for the position; weights are (B, H, N, S), 0 for other keys."""
        query = inputs.query
        if "shared" not in state:
            return super().advance(inputs, state)
        source, t = state["shared"], state["count"]
        place = self.drawn(source["lengths"]).picks(torch.full((1,), t, device=query.device)).squeeze(2)
        place = place.expand(len(query), self.site.heads, -1)  # (B, H, r)
        keys, values = (picked(source[name].unsqueeze(1), place.clamp(min=0)) for name in ("keys", "values"))
        q = self.queries(query.flatten(0, 1).unsqueeze(1)).squeeze(2).unflatten(0, query.shape[:2])
        keys, values, visible = keys.squeeze(1), values.squeeze(1), (place >= 0).unsqueeze(1)
        heads, weights = attend_step(
            q, keys, values, scale=self.scale, visible=visible, need_weights=inputs.need_weights
        )
        if weights is not None:
            by_position = weights.new_zeros(*weights.shape[:3], source["keys"].shape[2])
            weights = by_position.scatter_add(-1, place.clamp(min=0).unsqueeze(2).expand_as(weights), weights)
        return Attended(self.merge_heads(heads.transpose(1, 2), query), weights=weights), {**state, "count": t + 1}
