"""Relative positions for the `positions` slot: rotary, ALiBi, and Shaw's relative keys and values."""

from copy import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Inputs, Site
from mtkit.attention.options import Natural
from mtkit.attention.slots import Positions

BASE = 10_000.0
"""Base of the geometric series of rotary angles."""


class Rotary(Positions):
    """Queries and keys rotated by an angle that grows with their position, so that scores depend on the distance.

    Paper: Su et al., "RoFormer", 2021, arXiv 2104.09864, equation 34. Channels 2i and 2i + 1 rotate together; with
    `half`, i and i + K/2. An odd last channel is not rotated.
    """

    on_scores: ClassVar[bool] = False

    def __init__(self, site: Site, width: int, value_width: int | None = None, *, half: bool = False) -> None:
        super().__init__(site, width, value_width)
        self.in_halves = half
        self.pairs = width // 2

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x (..., T, K) by the angles of position (T,)."""
        # float64, and not a buffer, because a cast of the model to bfloat16 would change its type: float32 angles are
        # off by 1e-3 at position 10,000, bfloat16 angles are wrong from 256 on
        pair = torch.arange(self.pairs, dtype=torch.float64, device=x.device)
        angle = position.unsqueeze(-1) * BASE ** (-pair / self.pairs)  # (T, K/2)
        rotating, rest = x[..., : 2 * self.pairs], x[..., 2 * self.pairs :]
        if self.in_halves:
            cos, sin = angle.cos().type_as(x), angle.sin().type_as(x)
            left, right = rotating.chunk(2, dim=-1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)
        # one pass over adjacent numbers; products of every second channel with cosines and sines take eight
        numbers = self._complex(rotating)
        rotation = torch.polar(torch.ones_like(angle), angle).to(numbers.dtype)
        rotated = torch.view_as_real(numbers * rotation).flatten(-2).type_as(x)
        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated

    def _complex(self, x: Tensor) -> Tensor:
        """Return channels 2i and 2i + 1 as a complex number (..., T, K/2), without a copy if the layout allows it."""
        # with twice the bits, rounded once: a token then rotates to the same bits by itself and among others
        wide = torch.float32 if x.element_size() == 2 else torch.float64
        pairs = x.to(wide).unflatten(-1, (self.pairs, 2))
        adjacent = pairs.stride(-1) == 1 and not any(n % 2 for n in (pairs.storage_offset(), *pairs.stride()[:-1]))
        return torch.view_as_complex(pairs if adjacent else pairs.clone(memory_format=torch.contiguous_format))


class Alibi(Positions):
    """A penalty on scores that grows linearly with the distance, with a fixed slope for each head.

    Paper: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, arXiv 2108.12409. The encoder takes the
    symmetric form. The penalty is not divided by the square root of the head width.
    """

    def __init__(self, site: Site, width: int, value_width: int | None = None) -> None:
        super().__init__(site, width, value_width)
        self.some = range(site.heads)

    def of_heads(self, some: range) -> Positions:
        group = copy(self)
        group.some = some
        return group

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor | None:
        """Return (H, ..., T, S) in float32, whatever the queries' type: bfloat16 cannot represent 257."""
        distance = (query_position.unsqueeze(-1) - key_position.unsqueeze(-2)).abs()
        slopes = _slopes(self.site.heads, q.device)[self.some.start : self.some.stop]
        by_head = distance.dim() == q.dim()  # the second axis is the heads
        return -slopes.view(-1, *[1] * (distance.dim() - 2 * by_head)) * distance


class Shaw(Positions):
    """Learned vectors for each clipped distance, added to keys and values.

    Paper: Shaw, Uszkoreit and Vaswani, NAACL 2018, arXiv 1803.02155, equations 3 and 4; tables are shared by the heads
    and start at zero, which is plain attention. Distances beyond `clip` count as `clip`.
    """

    on_values: ClassVar[bool] = True

    def __init__(self, site: Site, width: int, value_width: int | None = None, *, clip: Natural = 16) -> None:
        super().__init__(site, width, value_width)
        self.clip = clip
        self.keys = nn.Parameter(torch.zeros(2 * clip + 1, width))
        self.value_table = nn.Parameter(torch.zeros(2 * clip + 1, self.value_width))

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor | None:
        """Return scale * q . a_K of the distance, (B, H, ..., T, S), through one product with the table."""
        by_distance = (q @ self.keys.T.type_as(q)) * scale  # (B, H, ..., T, 2 clip + 1)
        bucket = self._bucket(query_position, key_position)
        return by_distance.gather(-1, bucket.expand(*q.shape[:-1], bucket.shape[-1]))

    def values(self, weights: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return the sum of the weights per distance, times a_V."""
        bucket = self._bucket(query_position, key_position).expand(weights.shape)
        by_distance = weights.new_zeros(*weights.shape[:-1], 2 * self.clip + 1).scatter_add(-1, bucket, weights)
        return by_distance @ self.value_table.type_as(weights)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the vectors' norms by distance."""
        tables = {"key vector norm": self.keys, "value vector norm": self.value_table}
        return {f"{name} by distance": table.norm(dim=-1).unsqueeze(0) for name, table in tables.items()}

    def _bucket(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        distance = key_position.unsqueeze(-2) - query_position.unsqueeze(-1)
        return distance.clamp(-self.clip, self.clip) + self.clip


def _slopes(heads: int, device: torch.device) -> Tensor:
    """Return 2^(-8a/H), a = 1..H, for a power of two; else the slopes of the next lower power, then every other of
    twice it.
    """
    lower = 2 ** (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * torch.arange(1, lower + 1, device=device) / lower)
    between = 2.0 ** (-8.0 * torch.arange(1, 2 * lower + 1, 2, device=device) / (2 * lower))
    return torch.cat([slopes, between])[:heads]


POSITIONS = {"rotary": Rotary, "alibi": Alibi, "shaw": Shaw, "relative": Shaw}
"""Classes by name; "relative" is Shaw's, as the literature calls it."""
