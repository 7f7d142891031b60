"""Decays within chunks of c positions, and products of rows with keys that decay in between.

`from_end` is the direction of sums. False: they run from the first position on, and a token reads them with its own
term. True: they run from the last position back, and a token reads them without its own term. L_t is the sum of log A
in this direction, up to t; key s has the share exp(L_t - L_s) in row t. No exponent of a share that counts is above 0.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.linear._halved_products import (
    are_weak,
    exp_or_zero,
    gradients_in_halves,
    products_in_halves,
    weak_block,
)

Directions = tuple[bool, ...]
"""`from_end` of each direction."""

LOWEST = -1e4
"""Logarithm of a decay that counts as forgetting all: exp gives 0, and sums over a chunk keep their small terms."""


class Read(NamedTuple):
    """Rows (n, c, K) that read keys and sums, with the gradients of both."""

    rows: Tensor
    products: Tensor | None
    """(n, c, c) with keys; only two directions need them."""
    d_products: Tensor
    """Overwritten."""
    d_reads: Sequence[Tensor]
    """Gradients (n, c, K) of `read_rows`, by direction; none without sums before chunks."""


class _Decays:
    """Decays of n chunks, with one entry of a list for each direction."""

    directions: Directions
    reads: list[Tensor]
    """(n, c, 1 or K) share of the sums before the chunk in what a row reads."""
    writes: list[Tensor]
    """(n, c, 1 or K) share of what a position adds in the sums after the chunk."""
    carried: list[Tensor]
    """(n, 1 or K) share of the sums before the chunk in the sums after it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], Tensor] = {}

    def read_rows(self, rows: Tensor, direction: int) -> Tensor:
        """Return the rows (n, c, K) that read the sums before the chunk; computed once while `rows` lives."""
        if (id(rows), direction) not in self._rows:
            self._rows[id(rows), direction] = rows * self.reads[direction]
        return self._rows[id(rows), direction]


class HeadDecays(_Decays):
    """Decays common to all channels of a head, from logarithms (n, c, 1), or of n / i chunks, repeated i times."""

    def __init__(self, decay: Tensor, directions: Directions, chunks: int) -> None:
        super().__init__()
        self.directions, self.dtype, repeats = directions, decay.dtype, (chunks // len(decay), 1, 1)
        # differences of large sums in float32 would lose the small ones
        exact = decay if are_weak(decay.sum(1)) else decay.clamp(min=LOWEST).double()
        self.totals = [sums_of(exact, from_end) for from_end in directions]
        ends = [_end(total, from_end) for total, from_end in zip(self.totals, directions, strict=True)]
        self.reads = [exp_or_zero(total).to(decay.dtype).repeat(repeats) for total in self.totals]
        self.writes = [
            exp_or_zero(end - total).to(decay.dtype).repeat(repeats)
            for end, total in zip(ends, self.totals, strict=True)
        ]
        self.carried = [exp_or_zero(end).squeeze(1).to(decay.dtype).repeat(repeats[:2]) for end in ends]

    def fresh(self) -> "HeadDecays":
        """Return the same decays for other rows."""
        other = copy(self)
        other._rows = {}
        return other

    @cached_property
    def shares(self) -> Tensor:
        """(n or fewer, c, c) shares of keys in rows, of all directions."""
        by_direction: list[Tensor] = []
        for total, from_end in zip(self.totals, self.directions, strict=True):
            if total.dtype == self.dtype:
                shares = (total - total.mT).exp_()
            else:  # differences of both halves of the digits are as exact as those in float64, in half the time
                high = total.to(self.dtype)
                low = (total - high).to(self.dtype)
                shares = exp_or_zero((high - high.mT).add_(low).sub_(low.mT))
            by_direction.append(_triangle(shares, from_end))
        return by_direction[0] if len(by_direction) == 1 else by_direction[0].add_(by_direction[1])

    def write_rows(self, k: Tensor, direction: int) -> Tensor:
        """Return the keys (n, c, K) by which values are added to the sums after the chunk in a direction."""
        return k * self.writes[direction]

    def products(self, rows: Tensor, k: Tensor) -> Tensor:
        """Return the products (n, c, c) of rows (n, c, K) with keys."""
        return self._shared(rows @ k.mT)

    def gradients(
        self, all_reads: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor], wanted: bool
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradients of all rows, of the keys, and if `wanted`, of L (n, c, 1) for each direction."""
        d_totals: list[Tensor] = []
        if wanted and len(self.directions) > 1:
            d_totals = [self._d_total(direction, all_reads, k, d_writes) for direction in range(len(self.directions))]
        d_k, d_rows = torch.zeros_like(k), []
        for read in all_reads:
            d_scores = self._shared(read.d_products)
            d_rows.append(_add_scaled(d_scores @ k, read.d_reads, self.reads))
            d_k.baddbmm_(d_scores.mT, read.rows)
        _add_scaled(d_k, d_writes, self.writes)
        if wanted and len(self.directions) == 1:
            d_totals = [-_dot(k, d_k)]
            for read, d_read in zip(all_reads, d_rows, strict=True):
                d_totals[0] += _dot(read.rows, d_read)
        return d_rows, d_k, d_totals

    def _d_total(self, direction: int, all_reads: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor]) -> Tensor:
        d_total = torch.zeros_like(k[..., :1])
        for read in all_reads:
            assert read.products is not None
            pairs = _triangle(read.d_products * read.products, self.directions[direction])
            d_total += (pairs.sum(2) - pairs.sum(1)).unsqueeze(-1)
            if read.d_reads:
                d_total += _dot(self.read_rows(read.rows, direction), read.d_reads[direction])
        return d_total - _dot(k, d_writes[direction]) * self.writes[direction] if d_writes else d_total

    def _shared(self, products: Tensor) -> Tensor:
        products.unflatten(0, (-1, len(self.shares))).mul_(self.shares)
        return products


class ChannelDecays(_Decays):
    """Decays per key channel, from logarithms (n, c, K): products sum over channels that decay independently.

    If a chunk's decays are weak, exp(L_t) and exp(-L_s) are factors of its rows and keys.
    """

    def __init__(self, decay: Tensor, directions: Directions) -> None:
        super().__init__()
        self.directions, self.is_weak = directions, are_weak(decay.sum(1))
        self.decay = decay = decay if self.is_weak else decay.clamp(min=LOWEST)
        self.block = 0 if self.is_weak else weak_block(decay)
        totals = [sums_of(decay, from_end) for from_end in directions]
        self.carried = [
            exp_or_zero(_end(total, from_end)).squeeze(1) for total, from_end in zip(totals, directions, strict=True)
        ]
        self.reads = [total.exp_() if self.is_weak else exp_or_zero(total) for total in totals]

    @cached_property
    def inverse(self) -> list[Tensor]:
        """exp(-L), if decays are weak."""
        return [share.reciprocal() for share in self.reads]

    @cached_property
    def writes(self) -> list[Tensor]:  # type: ignore[override]
        return [exp_or_zero(_later(self.decay, from_end)) for from_end in self.directions]

    def key_rows(self, k: Tensor, direction: int) -> Tensor:
        """Return the keys (n, c, K) times exp(-L); computed once while `k` lives."""
        if (id(k), ~direction) not in self._rows:
            self._rows[id(k), ~direction] = k * self.inverse[direction]
        return self._rows[id(k), ~direction]

    def write_rows(self, k: Tensor, direction: int) -> Tensor:
        """Return the keys (n, c, K) by which values are added to the sums after the chunk in a direction."""
        if self.is_weak:
            return self.key_rows(k, direction) * self.carried[direction].unsqueeze(1)
        return k * self.writes[direction]

    def products(self, rows: Tensor, k: Tensor) -> Tensor:
        """Return the products (n, c, c) of rows (n, c, K) with keys."""
        products = [self._products(direction, rows, k) for direction in range(len(self.directions))]
        return products[0] if len(products) == 1 else products[0].add_(products[1])

    def gradients(
        self, all_reads: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor], wanted: bool
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradients of all rows, of the keys, and of L (n, c, K) for each direction.

        A product is a sum over channels of q_t k_s exp(L_t - L_s), so that L has the gradient q dq - k dk.
        """
        d_rows, d_k, d_totals = [torch.zeros_like(read.rows) for read in all_reads], torch.zeros_like(k), []
        for direction in range(len(self.directions)):
            d_total, d_keys = torch.zeros_like(k), torch.zeros_like(k)
            for read, of_read in zip(all_reads, d_rows, strict=True):
                more_rows, more_keys = self._gradients(direction, read, k)
                of_read.add_(more_rows)
                d_keys += more_keys
                d_total.addcmul_(read.rows, more_rows)
            if d_writes:
                d_keys.addcmul_(d_writes[direction], self._writes_of(direction))
            d_k += d_keys
            d_totals.append(d_total.addcmul_(k, d_keys, value=-1))
        return d_rows, d_k, d_totals

    def _writes_of(self, direction: int) -> Tensor:
        return (
            self.inverse[direction] * self.carried[direction].unsqueeze(1) if self.is_weak else self.writes[direction]
        )

    def _products(self, direction: int, rows: Tensor, k: Tensor) -> Tensor:
        from_end = self.directions[direction]
        if self.is_weak:
            return _triangle(self.read_rows(rows, direction) @ self.key_rows(k, direction).mT, from_end)
        if not from_end:
            return products_in_halves(rows, k, self.decay, self.block)
        products = products_in_halves(rows.flip(1), k.flip(1), self.decay.flip(1), self.block)
        return _triangle(products.flip(1, 2), from_end)

    def _gradients(self, direction: int, read: Read, k: Tensor) -> tuple[Tensor, Tensor]:
        from_end, rows = self.directions[direction], read.rows
        d_products = _triangle(read.d_products.clone(), from_end)
        if self.is_weak:
            d_rows = d_products @ self.key_rows(k, direction)
            if read.d_reads:
                d_rows += read.d_reads[direction]
            d_keys = d_products.mT @ self.read_rows(rows, direction)
            return d_rows.mul_(self.reads[direction]), d_keys.mul_(self.inverse[direction])
        if from_end:
            d_rows, d_keys = gradients_in_halves(
                rows.flip(1), k.flip(1), self.decay.flip(1), d_products.flip(1, 2), self.block
            )
            d_rows, d_keys = d_rows.flip(1), d_keys.flip(1)
        else:
            d_rows, d_keys = gradients_in_halves(rows, k, self.decay, d_products, self.block)
        if read.d_reads:
            d_rows.addcmul_(read.d_reads[direction], self.reads[direction])
        return d_rows, d_keys


def _add_scaled(total: Tensor, parts: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
    for part, scale in zip(parts, scales, strict=False):
        total.addcmul_(part, scale)
    return total


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def sums_of(x: Tensor, from_end: bool) -> Tensor:
    """Return the cumulative sums of x (n, c, X), from the first or the last position on.

    A product with a triangle of ones replaces `cumsum`, which is slow over columns on the CPU.
    """
    if x.shape[2] == 1:
        return x.flip(1).cumsum(1).flip(1) if from_end else x.cumsum(1)
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    return torch.bmm((ones.triu_() if from_end else ones.tril_()).expand(len(x), -1, -1), x)


def _end(total: Tensor, from_end: bool) -> Tensor:
    return total[:, :1] if from_end else total[:, -1:]


def _later(decay: Tensor, from_end: bool) -> Tensor:
    """Return the sum of the decays after each position; no large sum is subtracted from another."""
    rest = F.pad(decay[:, :-1], (0, 0, 1, 0)) if from_end else F.pad(decay[:, 1:], (0, 0, 0, 1))
    return sums_of(rest, not from_end)


def _triangle(products: Tensor, from_end: bool) -> Tensor:
    """Set the products (n, c, c) of rows with keys that they do not read to 0, in place."""
    return products.triu_(1) if from_end else products.tril_()
