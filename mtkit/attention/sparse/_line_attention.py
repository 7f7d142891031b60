"""The base of attention within lines: the rows or the columns of a folded sequence, each a sequence of its own."""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.kernels.dot_product import attend, attend_step, scores_of, weigh
from mtkit.attention.kernels.sparse import visible_pairs


class LineAttention(HeadAttention):
    """One pass of attention along lines, with projections and slots of its own; relative positions count along a line.

    A mechanism derives from it for its own projections, and holds one for each further pass.
    """

    def along(self, x: Tensor, valid: Tensor | None, *, causal: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The result for lines x (B, lines, L, D), in the same shape, and the regularizer's losses.

        valid (B, lines, L), with padding at the end of each line.
        """
        real = None if valid is None else valid.flatten(0, 1)
        q, k, v = self.queries_keys_values(x.flatten(0, 1))
        heads, _ = attend(
            q, k, v, scale=self.scale, causal=causal, valid=real, positions=self.positions, dropout=self.dropout
        )
        return self.joined(heads).view_as(x), self.losses(heads, v, None, real)

    def newest(self, tokens: Tensor, place: int) -> list[Tensor]:
        """Queries, keys and values (B, N, heads, K) of tokens (B, N, D), each at this place of a line."""
        here = torch.full((1,), place, device=tokens.device)
        rows = self.queries_keys_values(tokens.flatten(0, 1).unsqueeze(1), here)
        return [x.squeeze(2).unflatten(0, tokens.shape[:2]) for x in rows]

    def at_the_end(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The output (B, N, D) of the last tokens q (B, N, H, K) of lines of L tokens, (B, N, G, L, K)."""
        heads, _ = attend_step(
            q, keys, values, scale=self.scale, positions=self.positions, query_position=keys.shape[3] - 1
        )
        return self.joined(heads.transpose(1, 2))

    def naive_along(self, x: Tensor, line: Tensor, place: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
        """`along` from all pairs of an unfolded x (B, T, D), whose tokens lie in `line` (T,) at `place` (T,)."""
        q, k, v = self.queries_keys_values(x, place)
        visible = visible_pairs(line.unsqueeze(-1) == line, causal, valid)
        where: dict[str, Any] = {"positions": self.positions, "query_position": place, "key_position": place}
        heads, _ = weigh(scores_of(q, k, self.scale), q, v, scale=self.scale, visible=visible, **where)
        return self.joined(heads)
