"""Decayed sums within chunks of c positions: what a chunk adds to the sums, what it reads, and the gradients of both.

All tensors have one row for each of n chunks; S, (n, K, V), are the sums before a chunk in its direction. Gradients of
L, the sum of log A up to a position, follow from products: each is a sum over channels of q_t k_s exp(L_t - L_s), so
that L has the gradient q dq - k dk.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from mtkit.attention.linear._chunk_decays import ChannelDecays, HeadDecays, Read

Decays = HeadDecays | ChannelDecays


class Rows:
    """Queries, keys and values of chunks, (n, c, ...), each loaded when it is first read."""

    def __init__(self, load: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
        self._load, self._q, self._k, self._v = load, q, k, v

    @cached_property
    def q(self) -> Tensor:
        return self._load(self._q)

    @cached_property
    def k(self) -> Tensor:
        return self._load(self._k)

    @cached_property
    def v(self) -> Tensor:
        return self._load(self._v)


class Gradients(NamedTuple):
    """Gradients of `Rows`, and of L for each direction, (n, c, 1 or K), if these are computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    totals: Sequence[Tensor]


class Added:
    """The rule that adds values to sums, in one or both directions."""

    def __init__(self, rows: Rows, decays: Decays) -> None:
        self.rows, self.decays = rows, decays

    def written(self, direction: int) -> tuple[Tensor, Tensor]:
        """Return the shares (n, 1 or K) of S that the chunk keeps, and (n, K, V) that it adds to the sums after it."""
        return self.decays.carried[direction], self.decays.write_rows(self.rows.k, direction).mT @ self.rows.v

    def read(self, before: Sequence[Tensor]) -> Tensor:
        """Return (n, c, V) that the rows read of the sums before the chunk, by direction, and of the chunk itself."""
        q, k, v = self.rows.q, self.rows.k, self.rows.v
        outputs = self.decays.products(q, k) @ v
        for direction, sums in enumerate(before):
            outputs.baddbmm_(self.decays.read_rows(q, direction), sums)
        return outputs

    def entering(self, direction: int, d_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same shares, and the gradient of S from the outputs of the chunk."""
        return self.decays.carried[direction], self.decays.read_rows(self.rows.q, direction).mT @ d_outputs

    def gradients(
        self, d_outputs: Tensor, before: Sequence[Tensor], d_after: Sequence[Tensor], decays: bool
    ) -> Gradients:
        """Return all gradients from the gradients of the outputs and of the sums after the chunk; of L if `decays`."""
        q, k, v = self.rows.q, self.rows.k, self.rows.v
        products = self.decays.products(q, k)
        d_v = products.mT @ d_outputs
        for direction, d_sums in enumerate(d_after):
            d_v.baddbmm_(self.decays.write_rows(k, direction), d_sums)
        read = Read(q, products, d_outputs @ v.mT, [d_outputs @ sums.mT for sums in before])
        (d_q,), d_k, d_totals = self.decays.gradients([read], k, [v @ d_sums.mT for d_sums in d_after], decays)
        return Gradients(d_q, d_k, d_v, d_totals)
