"""Decays within chunks of c positions, and products of rows with keys that decay in between.

`from_end` is the direction of sums. False: they run from the first position on, and a token reads them with its own
term. True: they run from the last position back, and a token reads them without its own term. L_t is the sum of log A
in this direction, up to t; key s has the share exp(L_t - L_s) in row t. No exponent of a share that counts is above 0.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Directions = tuple[bool, ...]
"""`from_end` of each direction."""

LOWEST = -1e4
"""Logarithm of a decay that counts as forgetting all: exp gives 0, and sums over a chunk keep their small terms."""
LEAST = -40.0
"""Exponents below give exactly 0. Products of a few such numbers would be below 1e-38, at which processors are slow."""
WEAK = -20.0
"""Lowest sum of a block's decays for which exp(L_t) and exp(-L_s) may be separate factors without loss of digits."""


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
        exact = decay if _weak(decay.sum(1)) else decay.clamp(min=LOWEST).double()
        self.totals = [sums_of(exact, from_end) for from_end in directions]
        ends = [_end(total, from_end) for total, from_end in zip(self.totals, directions, strict=True)]
        self.reads = [_exp(total).to(decay.dtype).repeat(repeats) for total in self.totals]
        self.writes = [
            _exp(end - total).to(decay.dtype).repeat(repeats) for end, total in zip(ends, self.totals, strict=True)
        ]
        self.carried = [_exp(end).squeeze(1).to(decay.dtype).repeat(repeats[:2]) for end in ends]

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
                shares = _exp((high - high.mT).add_(low).sub_(low.mT))
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
    """Decays of each channel of the keys, from logarithms (n, c, K): products sum over channels that decay apart.

    If a block's decays are weak, exp(L_t) and exp(-L_s) are factors of its rows and keys. Between blocks, products are
    formed between the halves of larger blocks, with both decays measured from the border of the halves.
    """

    def __init__(self, decay: Tensor, directions: Directions) -> None:
        super().__init__()
        self.directions, self.is_weak = directions, _weak(decay.sum(1))
        self.decay = decay = decay if self.is_weak else decay.clamp(min=LOWEST)
        self.block = 0 if self.is_weak else _weak_block(decay)
        totals = [sums_of(decay, from_end) for from_end in directions]
        self.carried = [
            _exp(_end(total, from_end)).squeeze(1) for total, from_end in zip(totals, directions, strict=True)
        ]
        self.reads = [total.exp_() if self.is_weak else _exp(total) for total in totals]

    @cached_property
    def inverse(self) -> list[Tensor]:
        """exp(-L), if decays are weak."""
        return [share.reciprocal() for share in self.reads]

    @cached_property
    def writes(self) -> list[Tensor]:  # type: ignore[override]
        return [_exp(_later(self.decay, from_end)) for from_end in self.directions]

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
            return _products_in_halves(rows, k, self.decay, self.block)
        products = _products_in_halves(rows.flip(1), k.flip(1), self.decay.flip(1), self.block)
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
            d_rows, d_keys = _gradients_in_halves(
                rows.flip(1), k.flip(1), self.decay.flip(1), d_products.flip(1, 2), self.block
            )
            d_rows, d_keys = d_rows.flip(1), d_keys.flip(1)
        else:
            d_rows, d_keys = _gradients_in_halves(rows, k, self.decay, d_products, self.block)
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


def _exp(exponent: Tensor) -> Tensor:
    return F.threshold(exponent, LEAST, -torch.inf).exp_()


def _end(total: Tensor, from_end: bool) -> Tensor:
    return total[:, :1] if from_end else total[:, -1:]


def _later(decay: Tensor, from_end: bool) -> Tensor:
    """Return the sum of the decays after each position; no large sum is subtracted from another."""
    rest = F.pad(decay[:, :-1], (0, 0, 1, 0)) if from_end else F.pad(decay[:, 1:], (0, 0, 0, 1))
    return sums_of(rest, not from_end)


def _triangle(products: Tensor, from_end: bool) -> Tensor:
    """Set the products (n, c, c) of rows with keys that they do not read to 0, in place."""
    return products.triu_(1) if from_end else products.tril_()


def _weak(totals: Tensor) -> bool:
    """Return whether the sums of blocks' decays are weak; False on devices that would be waited for."""
    return totals.device.type == "cpu" and bool(totals.amin() >= WEAK)


def _weak_block(decay: Tensor) -> int:
    """Return the largest power of 2 of positions, less than c, so that all blocks' decays are weak, or 1."""
    block, (totals,) = 1, _to_power_of_2(decay)
    while totals.shape[1] > 2 and _weak(totals := totals.unflatten(1, (-1, 2)).sum(2)):
        block *= 2
    return block


def _to_power_of_2(*tensors: Tensor) -> list[Tensor]:
    """Return tensors (n, c, X) with zeros up to a power of 2 positions."""
    length = tensors[0].shape[1]
    return [F.pad(x, (0, 0, 0, (1 << (length - 1).bit_length()) - length)) for x in tensors]


def _products_in_halves(rows: Tensor, k: Tensor, decay: Tensor, block: int) -> Tensor:
    length = k.shape[1]
    rows, k, decay = _to_power_of_2(rows, k, decay)
    products = rows.new_zeros(*rows.shape[:2], rows.shape[1])
    late, early = _in_blocks(decay, block)
    inside = (_blocks(rows, block) * late) @ (_blocks(k, block) * early).mT
    products.unflatten(2, (-1, block)).unflatten(1, (-1, block)).diagonal(0, 1, 3).movedim(-1, 1).copy_(inside.tril_())
    for half, late, early in _halves(decay, block):
        _across(products, half).copy_((_half(rows, half, 1) * late) @ (_half(k, half, 0) * early).mT)
    return products[:, :length, :length]


def _gradients_in_halves(
    rows: Tensor, k: Tensor, decay: Tensor, d_products: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    length = k.shape[1]
    rows, k, decay = _to_power_of_2(rows, k, decay)
    more = k.shape[1] - length
    d_products = F.pad(d_products, (0, more, 0, more))
    late, early = _in_blocks(decay, block)
    inside = d_products.unflatten(2, (-1, block)).unflatten(1, (-1, block)).diagonal(0, 1, 3).movedim(-1, 1).tril()
    d_rows = ((inside @ (_blocks(k, block) * early)) * late).flatten(1, 2)
    d_k = ((inside.mT @ (_blocks(rows, block) * late)) * early).flatten(1, 2)
    for half, late, early in _halves(decay, block):
        across = _across(d_products, half)
        _half(d_rows, half, 1).addcmul_(across @ (_half(k, half, 0) * early), late)
        _half(d_k, half, 0).addcmul_(across.mT @ (_half(rows, half, 1) * late), early)
    return d_rows[:, :length], d_k[:, :length]


def _in_blocks(decay: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return exp(L) and exp(-L), (n, c / block, block, K), with L from the first position of a block to each."""
    total = _blocks(decay, block).clone()
    total[:, :, 0] = 0.0
    total = total.cumsum(2)
    return total.exp(), total.neg().exp()


def _halves(decay: Tensor, half: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, for growing blocks of two halves, a half's length and the decays between positions and the halves' border.

    The decays are from the border to each position of the second half, and from each position of the first half to it.
    """
    from_start = _blocks(decay, half).cumsum(2).flatten(1, 2)
    to_end = F.pad(_blocks(decay, half)[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2).flatten(1, 2)
    while half < decay.shape[1]:
        first, second, rest = _half(from_start, half, 0), _half(from_start, half, 1), _half(to_end, half, 0)
        yield half, _exp(second), _exp(rest)
        rest += second[..., -1:, :]
        second += first[..., -1:, :]
        half *= 2


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(1, (-1, size))


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """Return the first or the second halves (n, c / 2 half, half, K) of blocks of x (n, c, K)."""
    return x.unflatten(1, (-1, 2, half)).select(2, which)


def _across(products: Tensor, half: int) -> Tensor:
    """Return products (n, c / 2 half, half, half) of second halves with the first halves of the same blocks."""
    blocks = products.unflatten(2, (-1, 2, half)).unflatten(1, (-1, 2, half))
    return blocks[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1)
