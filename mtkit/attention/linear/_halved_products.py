"""Products of a chunk's rows with keys whose channels decay independently, however strongly.

Row t reads key s by the sum over channels of q_t k_s exp(L_t - L_s), with the sums L of the decays' logarithms. If a
block's decays are weak, exp(L_t) and exp(-L_s) are factors of its rows and keys. Between blocks, products are formed
between the halves of larger blocks, with both decays measured from the border of the halves.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = -40.0
"""Exponents below give exactly 0. Products of a few such numbers would be below 1e-38, at which processors are slow."""
WEAK = -20.0
"""Lowest sum of a block's decays for which exp(L_t) and exp(-L_s) may be separate factors without loss of digits."""


def exp_or_zero(exponent: Tensor) -> Tensor:
    """Return exp(exponent), or 0 below `LEAST`."""
    return F.threshold(exponent, LEAST, -torch.inf).exp_()


def are_weak(totals: Tensor) -> bool:
    """Return whether the sums of blocks' decays are weak; False on devices that would be waited for."""
    return totals.device.type == "cpu" and bool(totals.amin() >= WEAK)


def weak_block(decay: Tensor) -> int:
    """Return the largest block size, a power of 2 below c, at which all blocks' decays are weak; else 1."""
    block, (totals,) = 1, _to_power_of_2(decay)
    while totals.shape[1] > 2 and are_weak(totals := totals.unflatten(1, (-1, 2)).sum(2)):
        block *= 2
    return block


def _to_power_of_2(*tensors: Tensor) -> list[Tensor]:
    """Return tensors (n, c, X) with zeros up to a power of 2 positions."""
    length = tensors[0].shape[1]
    return [F.pad(x, (0, 0, 0, (1 << (length - 1).bit_length()) - length)) for x in tensors]


def products_in_halves(rows: Tensor, k: Tensor, decay: Tensor, block: int) -> Tensor:
    """Return the products (n, c, c) of rows (n, c, K) with keys, each with itself and earlier keys.

    decay (n, c, K) are logarithms; `block` is as `weak_block` returns it.
    """
    length = k.shape[1]
    rows, k, decay = _to_power_of_2(rows, k, decay)
    products = rows.new_zeros(*rows.shape[:2], rows.shape[1])
    late, early = _in_blocks(decay, block)
    inside = (_blocks(rows, block) * late) @ (_blocks(k, block) * early).mT
    _within(products, block).copy_(inside.tril_())
    for half, late, early in _halves(decay, block):
        _across(products, half).copy_((_half(rows, half, 1) * late) @ (_half(k, half, 0) * early).mT)
    return products[:, :length, :length]


def gradients_in_halves(
    rows: Tensor, k: Tensor, decay: Tensor, d_products: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and keys from the gradients (n, c, c) of their products."""
    length = k.shape[1]
    rows, k, decay = _to_power_of_2(rows, k, decay)
    more = k.shape[1] - length
    d_products = F.pad(d_products, (0, more, 0, more))
    late, early = _in_blocks(decay, block)
    inside = _within(d_products, block).tril()
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
        yield half, exp_or_zero(second), exp_or_zero(rest)
        rest += second[..., -1:, :]
        second += first[..., -1:, :]
        half *= 2


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(1, (-1, size))


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """Return the blocks' first or second halves (n, c / 2 half, half, K) in x (n, c, K)."""
    return x.unflatten(1, (-1, 2, half)).select(2, which)


def _within(products: Tensor, block: int) -> Tensor:
    """Return products (n, c / block, block, block) of blocks' rows with keys of the same block."""
    return products.unflatten(2, (-1, block)).unflatten(1, (-1, block)).diagonal(0, 1, 3).movedim(-1, 1)


def _across(products: Tensor, half: int) -> Tensor:
    """Return products (n, c / 2 half, half, half) of second halves with the first halves of the same blocks."""
    blocks = products.unflatten(2, (-1, 2, half)).unflatten(1, (-1, 2, half))
    return blocks[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1)
