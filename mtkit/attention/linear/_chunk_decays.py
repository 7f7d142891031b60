"""Decays within chunks of c positions, and products of rows with keys that decay in between.

A direction ("way") is False for sums from the first position on, which a token reads with its own term, and True for
sums from the last position on, which it reads without. With L_t, the sum of log A from the side where the sums come
from up to t, key s has the share exp(L_t - L_s) in row t. No exponent of a share that counts is above 0.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Ways = tuple[bool, ...]

LOWEST = -1e4
"""Logarithm of a decay that counts as forgetting all: exp gives 0, and sums over a chunk keep their small terms."""
LEAST = -40.0
"""Exponents below give exactly 0. Products of a few such numbers would be below 1e-38, at which processors are slow."""
PLAIN = -20.0
"""Lowest sum of a block's decays up to which products with exp(L_t) and exp(-L_s) apart keep their digits."""


class Read(NamedTuple):
    """Rows (n, c, K) that read keys and sums, with the gradients of both."""

    rows: Tensor
    products: Tensor | None
    """(n, c, c) with keys; only two ways need them."""
    d_products: Tensor
    """Overwritten."""
    d_reads: Sequence[Tensor]
    """Gradients (n, c, K) of `read_rows`, by way; none without sums before chunks."""


class _Decays:
    """Decays of n chunks, with one entry of a list for each way."""

    ways: Ways
    reads: list[Tensor]
    """(n, c, 1 or K) share of the sums before the chunk in what a row reads."""
    writes: list[Tensor]
    """(n, c, 1 or K) share of what a position adds in the sums after the chunk."""
    kept: list[Tensor]
    """(n, 1 or K) share of the sums before the chunk in the sums after it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], Tensor] = {}

    def read_rows(self, rows: Tensor, place: int) -> Tensor:
        """Return the rows (n, c, K) by which sums before the chunk are read in a way; made once while `rows` lives."""
        if (id(rows), place) not in self._rows:
            self._rows[id(rows), place] = rows * self.reads[place]
        return self._rows[id(rows), place]


class HeadDecays(_Decays):
    """Decays of all channels of a head together, from logarithms (n, c, 1), or of n / i chunks, repeated i times."""

    def __init__(self, decay: Tensor, ways: Ways, chunks: int) -> None:
        super().__init__()
        self.ways, self.dtype, repeats = ways, decay.dtype, (chunks // len(decay), 1, 1)
        # differences of large sums in float32 would lose the small ones
        exact = decay if _weak(decay.sum(1)) else decay.clamp(min=LOWEST).double()
        self.totals = [sums_of(exact, way) for way in ways]
        ends = [_end(total, way) for total, way in zip(self.totals, ways, strict=True)]
        self.reads = [_exp(total).to(decay.dtype).repeat(repeats) for total in self.totals]
        self.writes = [
            _exp(end - total).to(decay.dtype).repeat(repeats) for end, total in zip(ends, self.totals, strict=True)
        ]
        self.kept = [_exp(end).squeeze(1).to(decay.dtype).repeat(repeats[:2]) for end in ends]

    def fresh(self) -> "HeadDecays":
        """Return the same decays for other rows."""
        other = copy(self)
        other._rows = {}
        return other

    @cached_property
    def shares(self) -> Tensor:
        """(n or fewer, c, c) shares of keys in rows, of all ways."""
        every: list[Tensor] = []
        for total, way in zip(self.totals, self.ways, strict=True):
            if total.dtype == self.dtype:
                shares = (total - total.mT).exp_()
            else:  # differences of both halves of the digits are as exact as those in float64, in half the time
                high = total.to(self.dtype)
                low = (total - high).to(self.dtype)
                shares = _exp((high - high.mT).add_(low).sub_(low.mT))
            every.append(_triangle(shares, way))
        return every[0] if len(every) == 1 else every[0].add_(every[1])

    def write_rows(self, k: Tensor, place: int) -> Tensor:
        """Return the keys (n, c, K) by which values are added to the sums after the chunk in a way."""
        return k * self.writes[place]

    def products(self, rows: Tensor, k: Tensor) -> Tensor:
        """Return the products (n, c, c) of rows (n, c, K) with keys."""
        return self._shared(rows @ k.mT)

    def gradients(
        self, every: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor], wanted: bool
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradients of all rows, of the keys, and if `wanted`, by way, of L (n, c, 1)."""
        d_totals: list[Tensor] = []
        if wanted and len(self.ways) > 1:
            d_totals = [self._d_total(place, every, k, d_writes) for place in range(len(self.ways))]
        d_k, d_rows = torch.zeros_like(k), []
        for read in every:
            d_plain = self._shared(read.d_products)
            d_rows.append(_add_scaled(d_plain @ k, read.d_reads, self.reads))
            d_k.baddbmm_(d_plain.mT, read.rows)
        _add_scaled(d_k, d_writes, self.writes)
        if wanted and len(self.ways) == 1:
            d_totals = [-_dot(k, d_k)]
            for read, d_read in zip(every, d_rows, strict=True):
                d_totals[0] += _dot(read.rows, d_read)
        return d_rows, d_k, d_totals

    def _d_total(self, place: int, every: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor]) -> Tensor:
        d_total = torch.zeros_like(k[..., :1])
        for read in every:
            assert read.products is not None
            pairs = _triangle(read.d_products * read.products, self.ways[place])
            d_total += (pairs.sum(2) - pairs.sum(1)).unsqueeze(-1)
            if read.d_reads:
                d_total += _dot(self.read_rows(read.rows, place), read.d_reads[place])
        return d_total - _dot(k, d_writes[place]) * self.writes[place] if d_writes else d_total

    def _shared(self, products: Tensor) -> Tensor:
        products.unflatten(0, (-1, len(self.shares))).mul_(self.shares)
        return products


class ChannelDecays(_Decays):
    """Decays of each channel of the keys, from logarithms (n, c, K), which stand inside of the products.

    If a block's decays are weak, exp(L_t) and exp(-L_s) are factors of its rows and keys. Between blocks, products are
    formed between the halves of larger blocks, with both decays measured from the border of the halves.
    """

    def __init__(self, decay: Tensor, ways: Ways) -> None:
        super().__init__()
        self.ways, self.plain = ways, _weak(decay.sum(1))
        self.decay = decay = decay if self.plain else decay.clamp(min=LOWEST)
        self.block = 0 if self.plain else _weak_block(decay)
        totals = [sums_of(decay, way) for way in ways]
        self.kept = [_exp(_end(total, way)).squeeze(1) for total, way in zip(totals, ways, strict=True)]
        self.reads = [total.exp_() if self.plain else _exp(total) for total in totals]

    @cached_property
    def inverse(self) -> list[Tensor]:
        """exp(-L), if decays are weak."""
        return [share.reciprocal() for share in self.reads]

    @cached_property
    def writes(self) -> list[Tensor]:  # type: ignore[override]
        return [_exp(_later(self.decay, way)) for way in self.ways]

    def key_rows(self, k: Tensor, place: int) -> Tensor:
        """Return the keys (n, c, K) times exp(-L); made once while `k` lives."""
        if (id(k), ~place) not in self._rows:
            self._rows[id(k), ~place] = k * self.inverse[place]
        return self._rows[id(k), ~place]

    def write_rows(self, k: Tensor, place: int) -> Tensor:
        """Return the keys (n, c, K) by which values are added to the sums after the chunk in a way."""
        if self.plain:
            return self.key_rows(k, place) * self.kept[place].unsqueeze(1)
        return k * self.writes[place]

    def products(self, rows: Tensor, k: Tensor) -> Tensor:
        """Return the products (n, c, c) of rows (n, c, K) with keys."""
        products = [self._products(place, rows, k) for place in range(len(self.ways))]
        return products[0] if len(products) == 1 else products[0].add_(products[1])

    def gradients(
        self, every: Sequence[Read], k: Tensor, d_writes: Sequence[Tensor], wanted: bool
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradients of all rows, of the keys, and by way of L (n, c, K).

        A product is a sum over channels of q_t k_s exp(L_t - L_s), so that L has the gradient q dq - k dk.
        """
        d_rows, d_k, d_totals = [torch.zeros_like(read.rows) for read in every], torch.zeros_like(k), []
        for place in range(len(self.ways)):
            d_total, d_keys = torch.zeros_like(k), torch.zeros_like(k)
            for read, of_read in zip(every, d_rows, strict=True):
                more_rows, more_keys = self._gradients(place, read, k)
                of_read.add_(more_rows)
                d_keys += more_keys
                d_total.addcmul_(read.rows, more_rows)
            if d_writes:
                d_keys.addcmul_(d_writes[place], self._writes_of(place))
            d_k += d_keys
            d_totals.append(d_total.addcmul_(k, d_keys, value=-1))
        return d_rows, d_k, d_totals

    def _writes_of(self, place: int) -> Tensor:
        return self.inverse[place] * self.kept[place].unsqueeze(1) if self.plain else self.writes[place]

    def _products(self, place: int, rows: Tensor, k: Tensor) -> Tensor:
        way = self.ways[place]
        if self.plain:
            return _triangle(self.read_rows(rows, place) @ self.key_rows(k, place).mT, way)
        if not way:
            return _products_in_halves(rows, k, self.decay, self.block)
        products = _products_in_halves(rows.flip(1), k.flip(1), self.decay.flip(1), self.block)
        return _triangle(products.flip(1, 2), way)

    def _gradients(self, place: int, read: Read, k: Tensor) -> tuple[Tensor, Tensor]:
        way, rows = self.ways[place], read.rows
        d_products = _triangle(read.d_products.clone(), way)
        if self.plain:
            d_rows = d_products @ self.key_rows(k, place)
            if read.d_reads:
                d_rows += read.d_reads[place]
            d_keys = d_products.mT @ self.read_rows(rows, place)
            return d_rows.mul_(self.reads[place]), d_keys.mul_(self.inverse[place])
        if way:
            d_rows, d_keys = _gradients_in_halves(
                rows.flip(1), k.flip(1), self.decay.flip(1), d_products.flip(1, 2), self.block
            )
            d_rows, d_keys = d_rows.flip(1), d_keys.flip(1)
        else:
            d_rows, d_keys = _gradients_in_halves(rows, k, self.decay, d_products, self.block)
        if read.d_reads:
            d_rows.addcmul_(read.d_reads[place], self.reads[place])
        return d_rows, d_keys


def _add_scaled(total: Tensor, parts: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
    for part, scale in zip(parts, scales, strict=False):
        total.addcmul_(part, scale)
    return total


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def sums_of(x: Tensor, way: bool) -> Tensor:
    """Return the sums of x (n, c, X) up to each position, from the side where a way begins.

    A product with a triangle of ones takes the place of `cumsum`, which is slow over columns on the CPU.
    """
    if x.shape[2] == 1:
        return x.flip(1).cumsum(1).flip(1) if way else x.cumsum(1)
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    return torch.bmm((ones.triu_() if way else ones.tril_()).expand(len(x), -1, -1), x)


def _exp(exponent: Tensor) -> Tensor:
    return F.threshold(exponent, LEAST, -torch.inf).exp_()


def _end(total: Tensor, way: bool) -> Tensor:
    return total[:, :1] if way else total[:, -1:]


def _later(decay: Tensor, way: bool) -> Tensor:
    """Return the sum of the decays after each position; no large sum is subtracted from another."""
    rest = F.pad(decay[:, :-1], (0, 0, 1, 0)) if way else F.pad(decay[:, 1:], (0, 0, 0, 1))
    return sums_of(rest, not way)


def _triangle(products: Tensor, way: bool) -> Tensor:
    """Set the products (n, c, c) of rows with keys that they do not read to 0, in place."""
    return products.triu_(1) if way else products.tril_()


def _weak(totals: Tensor) -> bool:
    """Return whether the sums of blocks' decays are weak; False on devices that would be waited for."""
    return totals.device.type == "cpu" and bool(totals.amin() >= PLAIN)


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
    """Yield the halves' length in blocks of 2, 4, 8 ... halves, and what is left across the border of the halves.

    That is from the border to each position of the second half, and from each position of the first half to the border.
    """
    before = _blocks(decay, half).cumsum(2).flatten(1, 2)
    after = F.pad(_blocks(decay, half)[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2).flatten(1, 2)
    while half < decay.shape[1]:
        first, second, rest = _half(before, half, 0), _half(before, half, 1), _half(after, half, 0)
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
