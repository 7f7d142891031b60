"""Decayed sums S_t = A_t S_t-1 + k_t u_t^T and their reads o_t = S_t^T q_t, in chunks, in O(T) memory.

A_t is a number of each head or the diagonal of K numbers. u_t is the value v_t or, with beta, the correction
beta_t (v_t - (A_t S_t-1)^T k_t), so that the value stored under a key is replaced (the delta rule).

In a chunk, let L_t be the sum of log A up to t, and E_ts = exp(L_t - L_s) for s <= t. Then, with the sums S before it,

    O = (E * Q K^T) U + (e^L * Q) S        S_after = e^(L_c) S + (e^(L_c - L) * K)^T U

and the corrections solve (I + beta * E * K K^T, below the diagonal) U = beta (V - (e^L * K) S) (Yang et al. 2024, arXiv
2312.06635, section 4, and 2412.06464, section 3). All that does not depend on S is computed for `TOGETHER` chunks at
once. The sums before these chunks are then a product of a triangle of decays with what the chunks add (Dao and Gu 2024,
arXiv 2405.21060, section 6); corrections need one chunk after the other. No exponent is above 0, and no product is
divided by a decay: e^(-L) overflows where a decay is strong. Decays of channels stand inside the products: these are
formed between the halves of blocks of 2, 4, 8 ... positions, with both decays measured from the border of the halves.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.recurrence import Part, recur

TOGETHER = 8
"""Chunks that are computed at once."""

LOWEST = -1e4
"""Logarithm of a decay that counts as forgetting all: exp gives 0, and sums over a chunk keep their small terms."""


class Terms(NamedTuple):
    """Queries, keys, values and decays of a sequence, one row for each position."""

    q: Tensor
    """(B, H, T, K)."""
    k: Tensor
    """(B, H, T, K), zero at padding."""
    v: Tensor
    """(B, H, T, V)."""
    decay: Tensor
    """(B, H, T, 1) or (B, H, T, K) log A, 0 at most."""
    beta: Tensor | None = None
    """(B, H, T, 1) share of the stored value that is replaced; None: values are added."""

    def masked(self, valid: Tensor) -> "Terms":
        """Return terms whose padding, where valid (B, T) is False, neither writes nor decays."""
        hidden = ~valid[:, None, :, None]
        return self._replace(k=self.k.masked_fill(hidden, 0.0), decay=self.decay.masked_fill(hidden, 0.0))


def read_causal(terms: Terms, chunk: int) -> Tensor:
    """Return o_t = S_t^T q_t, (B, H, T, V), for all t."""
    return _read(_streams(terms), None, chunk).unflatten(0, terms.q.shape[:2])


def read_both_ways(forward: Terms, backward: Terms, chunk: int) -> Tensor:
    """Return S_t^T q_t + (A_t S'_t+1)^T q'_t, (B, H, T, V), where S' and q' belong to `backward`, summed from its end.

    Both sequences are in the order of the text. The second read leaves the token itself out.
    """
    streams = [
        torch.cat([ahead, back.flip(-2)]) for ahead, back in zip(_streams(forward), _streams(backward), strict=True)
    ]
    count = len(streams[0]) // 2
    excluding = torch.arange(2 * count, device=streams[0].device).view(-1, 1, 1) >= count
    ahead, back = _read(streams, excluding, chunk).split(count)
    return (ahead + back.flip(-2)).unflatten(0, forward.q.shape[:2])


def sums_after(terms: Terms, chunk: int) -> Tensor:
    """Return the sums (B, H, K, V) after the last position."""

    def step(_: Part, rows: list[Tensor], __: list[Tensor], sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        in_chunks = _in_chunks(rows, chunk)
        k, decay = in_chunks[0].flatten(0, 1), in_chunks[2].flatten(0, 1)
        overlap = _products([k], k, decay)[:, 0] if len(in_chunks) > 3 else None  # with beta
        after = _chunk_sums(in_chunks, overlap, sums[0])[2]
        return rows[0].new_empty(*rows[0].shape[:-1], 0), [after]

    streams = _streams(terms)[1:]
    _, (sums,) = recur(step, streams, [_no_sums(*streams[:2])], chunk=TOGETHER * chunk)
    return sums.unflatten(0, terms.k.shape[:2])


def read_next(token: Terms, sums: Tensor) -> Tensor:
    """Return the outputs (B, H, 1, V) of one more token, which is written into the sums (B, H, K, V) in place."""
    with torch.autocast(sums.device.type, enabled=False):
        sums.mul_(token.decay.exp().mT)
        written = token.v if token.beta is None else token.beta * (token.v - token.k @ sums)
        return token.q @ sums.addcmul_(token.k.mT, written)


def read_literally(terms: Terms, *, excluding: bool = False) -> tuple[Tensor, Tensor]:
    """Return the reads (B, H, T, V) and the last sums by the recurrence itself; for tests.

    excluding: read A_t S_t-1, without the token itself.
    """
    sums = terms.k.new_zeros(*terms.k.shape[:2], terms.k.shape[-1], terms.v.shape[-1])
    outputs = []
    for t in range(terms.k.shape[2]):
        k, written = terms.k[:, :, t], terms.v[:, :, t]
        kept = terms.decay[:, :, t].exp().unsqueeze(-1) * sums
        if terms.beta is not None:
            written = terms.beta[:, :, t] * (written - torch.einsum("bhkv,bhk->bhv", kept, k))
        sums = kept + torch.einsum("bhk,bhv->bhkv", k, written)
        outputs.append(torch.einsum("bhkv,bhk->bhv", kept if excluding else sums, terms.q[:, :, t]))
    return torch.stack(outputs, dim=2), sums


def _read(streams: list[Tensor], excluding: Tensor | None, chunk: int) -> Tensor:
    """Return the reads (N, T, V) of N streams; those where `excluding` (N, 1, 1) is True leave the token itself out."""

    def step(
        part: Part, rows: list[Tensor], constants: list[Tensor], sums: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, *in_chunks = _in_chunks(rows, chunk)
        k, _, decay, *beta = in_chunks
        flat_q, flat_k, flat_decay = (x.flatten(0, 1) for x in (q, k, decay))
        products = _products([flat_q, flat_k] if beta else [flat_q], flat_k, flat_decay)
        seen = products[:, 0].unflatten(0, q.shape[:2])
        if constants:
            own = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
            seen = seen.masked_fill(own & constants[0].unsqueeze(1), 0.0)
        written, before, after = _chunk_sums(in_chunks, products[:, 1] if beta else None, sums[0])
        outputs = seen @ written
        if not part.whole or q.shape[1] > 1:
            outputs = outputs + (q * decay.cumsum(2).exp()) @ before
        return outputs.flatten(1, 2)[:, : rows[0].shape[1]], [after]

    outputs, _ = recur(
        step,
        streams,
        [_no_sums(*streams[1:3])],
        constants=[] if excluding is None else [excluding],
        chunk=TOGETHER * chunk,
    )
    return outputs


def _in_chunks(rows: list[Tensor], chunk: int) -> list[Tensor]:
    """Return rows (N, T, X) as (N, m, c, X), with zeros at the end."""
    length = rows[0].shape[1]
    size = min(chunk, length)
    more = -length % size
    return [(F.pad(x, (0, 0, 0, more)) if more else x).unflatten(1, (-1, size)) for x in rows]


def _chunk_sums(in_chunks: list[Tensor], overlap: Tensor | None, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is written, (N, m, c, V), and the sums before each chunk, (N, m, K, V), and after all, (N, K, V).

    Keys, values, decays and perhaps beta are (N, m, c, ...); overlap (N m, c, c) are the decayed products of keys with
    beta; sums (N, K, V) are those before the first chunk.
    """
    k, v, decay, *beta = in_chunks
    added, kept = (k * _later(decay).exp()).mT, decay.sum(2)  # (N, m, K, c), (N, m, 1 or K)
    if overlap is None:
        states = torch.cat([sums.unsqueeze(1), added @ v], dim=1)  # (N, m + 1, K, V)
        total = F.pad(kept.double().cumsum(1), (0, 0, 1, 0)).mT.unsqueeze(-1)  # (N, 1 or K, m + 1, 1)
        weights = _under_triangle(total, k.dtype)
        if weights.shape[1] == 1:
            states = (weights[:, 0] @ states.flatten(2)).unflatten(2, states.shape[2:])
        else:
            states = (weights @ states.transpose(1, 2)).transpose(1, 2)
        return v, states[:, :-1], states[:, -1]
    lower = (beta[0] * overlap.unflatten(0, k.shape[:2])).tril(-1)
    both = beta[0] * torch.cat([v, k * decay.cumsum(2).exp()], dim=-1)
    solved = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True)
    values, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    kept, before, written = kept.exp().unsqueeze(-1), [], []
    for chunk in range(k.shape[1]):
        before.append(sums)
        written.append(torch.baddbmm(values[:, chunk], known[:, chunk], sums, alpha=-1))
        sums = torch.baddbmm(kept[:, chunk] * sums, added[:, chunk], written[-1])
    return torch.stack(written, 1), torch.stack(before, 1), sums


def _streams(terms: Terms) -> list[Tensor]:
    """Return the parts of a sequence with one row (N, T, ...) for each head of each segment."""
    return [x.flatten(0, 1) for x in (*terms[:3], terms.decay.clamp(min=LOWEST), terms.beta) if x is not None]


def _no_sums(k: Tensor, v: Tensor) -> Tensor:
    return k.new_zeros(1, k.shape[-1], v.shape[-1]).expand(len(k), -1, -1)


def _later(decay: Tensor) -> Tensor:
    """Return the sum of the decays (..., c, K) after each position; no large sum is subtracted from another."""
    return F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _products(rows: list[Tensor], k: Tensor, decay: Tensor) -> Tensor:
    """Return the products (N, R, c, c) of R rows (N, c, K) with the keys up to their position, decayed in between."""
    if decay.shape[-1] == k.shape[-1] > 1:
        products: Tensor = _ChannelProducts.apply(torch.stack(rows, dim=1), k, decay)  # type: ignore[no-untyped-call]
        return products
    shares = _under_triangle(decay.double().cumsum(1), k.dtype)
    return torch.stack([row @ k.mT * shares for row in rows], dim=1)


def _under_triangle(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(L_t - L_s) for s <= t, else 0, (..., c, c), from sums L (..., c, 1) in float64.

    Differences of sums in float32 would lose the small ones.
    """
    after = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    return (total - total.mT).to(dtype).masked_fill(after, -torch.inf).exp()


class _ChannelProducts(torch.autograd.Function):
    """The products (N, R, c, c) of rows (N, R, c, K) with keys, with decays (N, c, K) of each channel.

    A product is a sum over channels of q_t k_s exp(L_t - L_s), so that L has the gradient q dq - k dk.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, k: Tensor, decay: Tensor) -> Tensor:
        ctx.save_for_backward(rows, k, decay)
        length = k.shape[1]
        rows, k, decay = _to_power_of_2(rows, k, decay)
        products = torch.diag_embed((rows * k.unsqueeze(1)).sum(-1))
        for half, late, early in _halves(decay):
            q, key = _half(rows, half, 1) * late.unsqueeze(1), _half(k, half, 0) * early
            _across(products, half).copy_(q @ key.mT.unsqueeze(1))
        return products[..., :length, :length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = gradient.shape[-1]
        rows, k, decay = _to_power_of_2(*ctx.saved_tensors)
        more = rows.shape[2] - length
        gradient = F.pad(gradient, (0, more, 0, more))
        d_rows, d_k = torch.zeros_like(rows), torch.zeros_like(k)
        for half, late, early in _halves(decay):
            q, key = _half(rows, half, 1) * late.unsqueeze(1), _half(k, half, 0) * early
            across = _across(gradient, half)
            _half(d_rows, half, 1).addcmul_(across @ key.unsqueeze(1), late.unsqueeze(1))
            _half(d_k, half, 0).addcmul_((across.mT @ q).sum(1), early)
        d_total = (rows * d_rows).sum(1) - k * d_k
        own = gradient.diagonal(dim1=2, dim2=3).unsqueeze(-1)
        d_rows.addcmul_(own, k.unsqueeze(1))
        d_k += (own * rows).sum(1)
        d_decay = d_total.flip(1).cumsum(1).flip(1)
        return d_rows[:, :, :length], d_k[:, :length], d_decay[:, :length]


def _to_power_of_2(*tensors: Tensor) -> list[Tensor]:
    """Return tensors (..., c, K) with zeros up to a power of 2 positions."""
    length = tensors[0].shape[-2]
    return [F.pad(x, (0, 0, 0, (1 << (length - 1).bit_length()) - length)) for x in tensors]


def _halves(decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the halves' length in blocks of 2, 4, 8 ... positions, and what is left across the border of the halves.

    That is from the border to each position of the second half, and from each position of the first half to the border.
    """
    before, after = decay.clone(), torch.zeros_like(decay)
    half = 1
    while half < decay.shape[-2]:
        first, second, rest = _half(before, half, 0), _half(before, half, 1), _half(after, half, 0)
        yield half, second.exp(), rest.exp()
        rest += second[..., -1:, :]
        second += first[..., -1:, :]
        half *= 2


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """Return the first or the second halves (..., c / 2 half, half, K) of blocks of x (..., c, K)."""
    return x.unflatten(-2, (-1, 2, half)).select(-3, which)


def _across(products: Tensor, half: int) -> Tensor:
    """Return products (N, R, c / 2 half, half, half) of second halves with the first halves of the same blocks."""
    blocks = products.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).movedim(-1, 2)
