"""What a chunk of c positions adds to decayed sums and reads of them, and the gradients of both.

All tensors have one row for each of n chunks; S, (n, K, V), are the sums before a chunk in its direction. Gradients of
L, the sum of log A up to a position, follow from products: each is a sum over channels of q_t k_s exp(L_t - L_s), so
that L has the gradient q dq - k dk.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
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
    """Gradients of `Rows`, and those of L by direction, (n, c, 1 or K), if they are made."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    totals: Sequence[Tensor]


class Added:
    """The rule that adds values to sums, in one or both directions."""

    def __init__(self, rows: Rows, decays: Decays) -> None:
        self.rows, self.decays = rows, decays

    def written(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the shares (n, 1 or K) of S that the chunk keeps, and (n, K, V) that it adds to the sums after it."""
        return self.decays.kept[place], self.decays.write_rows(self.rows.k, place).mT @ self.rows.v

    def read(self, before: Sequence[Tensor]) -> Tensor:
        """Return (n, c, V) that the rows read of the sums before the chunk, by direction, and of the chunk itself."""
        q, k, v = self.rows.q, self.rows.k, self.rows.v
        outputs = self.decays.products(q, k) @ v
        for place, sums in enumerate(before):
            outputs.baddbmm_(self.decays.read_rows(q, place), sums)
        return outputs

    def entering(self, place: int, d_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same shares, and the gradient of S from the outputs of the chunk."""
        return self.decays.kept[place], self.decays.read_rows(self.rows.q, place).mT @ d_outputs

    def gradients(
        self, d_outputs: Tensor, before: Sequence[Tensor], d_after: Sequence[Tensor], decays: bool
    ) -> Gradients:
        """Return all gradients, from those of the outputs and of the sums after the chunk; of L if `decays`."""
        q, k, v = self.rows.q, self.rows.k, self.rows.v
        products = self.decays.products(q, k)
        d_v = products.mT @ d_outputs
        for place, d_sums in enumerate(d_after):
            d_v.baddbmm_(self.decays.write_rows(k, place), d_sums)
        read = Read(q, products, d_outputs @ v.mT, [d_outputs @ sums.mT for sums in before])
        (d_q,), d_k, d_totals = self.decays.gradients([read], k, [v @ d_sums.mT for d_sums in d_after], decays)
        return Gradients(d_q, d_k, d_v, None, d_totals)


class Corrected:
    """The delta rule in one direction: U = (I + beta * E * K K^T)^-1 beta (V - (e^L * K) S) is written, not V."""

    def __init__(self, rows: Rows, beta: Tensor, decays: Decays, inverse: Tensor | None = None) -> None:
        self.rows, self.beta, self.decays = rows, beta, decays
        (self.way,) = decays.ways
        if inverse is None:
            system = _strict(decays.products(rows.k, rows.k), self.way).mul_(beta)
            one = torch.eye(system.shape[1], dtype=system.dtype, device=system.device).expand_as(system)
            inverse = torch.linalg.solve_triangular(system, one, upper=self.way, unitriangular=True)
        self.inverse = inverse
        """The inverse (n, c, c) of the system, which is kept for the backward pass."""

    def written(self, _: int) -> tuple[Tensor, Tensor]:
        """Return M (n, K, K) and N (n, K, V): the sums after the chunk are M S + N."""
        write, known = self._write(), self.decays.read_rows(self.rows.k, 0)
        return self._moved(write.mT @ known), write.mT @ self.rows.v

    def read(self, before: Sequence[Tensor]) -> Tensor:
        """Return (n, c, V) that the rows read of the sums before the chunk, if there are any, and of the chunk."""
        outputs = self.decays.products(self.rows.q, self.rows.k) @ self._corrections(before)[1]
        for sums in before:
            outputs.baddbmm_(self.decays.read_rows(self.rows.q, 0), sums)
        return outputs

    def entering(self, _: int, d_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return M^T and the gradient of S from the outputs of the chunk."""
        q, k = self.rows.q, self.rows.k
        known = self.decays.read_rows(k, 0)
        d_known = (self.inverse.mT @ (self.decays.products(q, k).mT @ d_outputs)).mul_(self.beta)
        d_sums = (self.decays.read_rows(q, 0).mT @ d_outputs).baddbmm_(known.mT, d_known, alpha=-1)
        return self._moved(known.mT @ self._write()), d_sums

    def gradients(
        self, d_outputs: Tensor, before: Sequence[Tensor], d_after: Sequence[Tensor], decays: bool
    ) -> Gradients:
        """Return all gradients, from those of the outputs and of the sums after the chunk; of L if `decays`."""
        q, k = self.rows.q, self.rows.k
        asked, written = self._corrections(before)
        products, overlap = self.decays.products(q, k), _strict(self.decays.products(k, k), self.way)
        d_written = products.mT @ d_outputs
        for d_sums in d_after:
            d_written.baddbmm_(self.decays.write_rows(k, 0), d_sums)
        d_asked = self.inverse.mT @ d_written
        d_system = _strict(d_asked @ written.mT, self.way).neg_()
        d_beta = (d_asked * asked).sum(-1, keepdim=True).add_((d_system * overlap).sum(-1, keepdim=True))
        d_v = d_asked.mul_(self.beta)
        reads = [
            Read(q, products, d_outputs @ written.mT, [d_outputs @ sums.mT for sums in before]),
            Read(k, overlap, d_system.mul_(self.beta), [(d_v @ sums.mT).neg_() for sums in before]),
        ]
        (d_q, d_rows), d_k, d_totals = self.decays.gradients(reads, k, [written @ x.mT for x in d_after], decays)
        return Gradients(d_q, d_k.add_(d_rows), d_v, d_beta, d_totals)

    def _write(self) -> Tensor:
        """Return the rows (n, c, K) by which V - (e^L * K) S is added to the sums after the chunk."""
        return (self.inverse.mT @ self.decays.write_rows(self.rows.k, 0)).mul_(self.beta)

    def _corrections(self, before: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return V - (e^L * K) S and the corrections U, (n, c, V)."""
        asked = self.rows.v
        for sums in before:
            asked = torch.baddbmm(asked, self.decays.read_rows(self.rows.k, 0), sums, alpha=-1)
        return asked, self.inverse @ (self.beta * asked)

    def _moved(self, replaced: Tensor) -> Tensor:
        """Return the diagonal of what the decays keep minus what the keys replace, (n, K, K), in place."""
        replaced.neg_().diagonal(dim1=1, dim2=2).add_(self.decays.kept[0])
        return replaced


def _strict(products: Tensor, way: bool) -> Tensor:
    """Set products (n, c, c) with the own and later positions to 0, in place."""
    return products.triu_(1) if way else products.tril_(-1)
