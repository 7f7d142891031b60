"""Streaming attention: the first tokens, which keep weight that no other token wants, and a window of the latest.

Paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM), ICLR 2024, arXiv
2309.17453, section 3.
Departures: the mask holds in training, too; the paper drops keys of a model trained with full attention. First tokens
are not counted in the window. As in the paper, rotary positions are places in the cache: relative to a first token the
query has position min(i, g + r), relative to others i. The paper rotates all cached keys again at each step; here a
query has two rotations and a key one, both parts side by side, so that keys are twice as wide. Embeddings of absolute
positions are not renumbered.
Cost: O(T (g + r)). A step costs O(g + r), at any position, and keeps g + r + 1 tokens.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Site
from mtkit.attention.kernels.pattern import Band, Columns, Pattern
from mtkit.attention.options import Natural, NaturalByLayer, of_layer
from mtkit.attention.slots import combining


class Streaming(PatternAttention):
    """Scaled dot-product attention to the first tokens and to a sliding window.

    first_tokens: number of first tokens that all later ones see, g. window_radius: number of tokens seen before the
    query's own, r; one number, or one per layer.
    """

    roles = published = frozenset({"decoder"})
    paper = "Xiao et al. 2024, arXiv 2309.17453"
    complexity = "O(T (g + r))"
    growth = 1
    longest_path = "O(T / r)"
    # rotary positions alone are rotations of queries and keys; others would need their own renumbering
    slots = combining("projection", "merge", "regularizer", positions={"rotary"})
    small: ClassVar[dict[str, Any]] = {"first_tokens": 2, "window_radius": 3}
    variants = ({"first_tokens": 0}, {"window_radius": [2, 4]})

    def __init__(self, site: Site, *, first_tokens: Natural = 4, window_radius: NaturalByLayer = 128) -> None:
        super().__init__(site)
        self.first = first_tokens
        self.radius = of_layer("window_radius", window_radius, site)
        window = Band(self.radius, 0)
        pattern: Pattern = window | Columns(self.first) if self.first else window
        self.groups = by_head([pattern] * site.heads)

    @property
    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """The (heads, width) of cached keys and values; keys have two parts if positions are renumbered."""
        shapes = super().cache_shapes
        heads, width = shapes["keys"]
        return {**shapes, "keys": (heads, 2 * width)} if self._renumbers else shapes

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, H, T, K), or to (B, H, T, 2 K): rotated for first tokens, and for the window."""
        if not self._renumbers:
            return super().queries(query, position)
        q = self.projection.queries(self.q_proj(query))
        position = _places(q, position)
        return torch.cat(
            [self._rotated(q, position.clamp(max=self.first + self.radius)), self._rotated(q, position)], -1
        )

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map (B, T, D) to keys (B, G, T, K or 2 K), one half of each zero, and values (B, G, T, V)."""
        k, v = super().keys_values(memory, position)
        if not self._renumbers:
            return k, v
        first = (_places(k, position) < self.first).unsqueeze(-1)
        return torch.cat([k.masked_fill(~first, 0.0), k.masked_fill(first, 0.0)], -1), v

    def queries_keys_values(self, tokens: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if not self._renumbers:
            return super().queries_keys_values(tokens, position)
        return self.queries(tokens, position), *self.keys_values(tokens, position)

    @property
    def _renumbers(self) -> bool:
        return self.positions is not None and self.first > 0


def _places(x: Tensor, position: Tensor | None) -> Tensor:
    """Return the positions (T,) of x (..., T, K), 0 to T - 1 if they are None."""
    return torch.arange(x.shape[-2], device=x.device) if position is None else position
