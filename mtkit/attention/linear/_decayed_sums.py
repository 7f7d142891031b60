"""Decayed sums S_t = A_t S_t-1 + k_t u_t^T and their reads o_t = S_t^T q_t, in chunks, in O(T) memory.

A_t is a number of each head or the diagonal of K numbers. u_t is the value v_t or, with beta, the correction
beta_t (v_t - (A_t S_t-1)^T k_t), so that the value stored under a key is replaced (the delta rule).

In a chunk, let L_t be the sum of log A up to t, and E_ts = exp(L_t - L_s) for s <= t. Then, with the sums S before it,

    O = (E * Q K^T) U + (e^L * Q) S        S_after = e^(L_c) S + (e^(L_c - L) * K)^T U

and the corrections solve (I + beta * E * K K^T, below the diagonal) U = beta (V - (e^L * K) S) (Yang et al. 2024, arXiv
2312.06635, section 4, and 2412.06464, section 3). `_chunked_sums` adds values, by the equations of `_chunk_rules`, and
`_chunked_corrections` corrections; `_looped_sums` does both by compiled loops on the CPU. `_chunk_decays` has E. If
a decay is strong, e^(-L) overflows: products of channels are then formed between the halves of blocks of 2, 4, 8 ...
positions, with both decays measured from the border of the halves, so that no exponent is above 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtkit.attention.bases.recent_sums import add_recent, corrected_next, fade, read_recent
from mtkit.attention.contract import State
from mtkit.attention.linear._chunked_corrections import corrected_reads, corrected_sums
from mtkit.attention.linear._chunked_sums import decayed_reads, decayed_sums


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
        """Return terms whose padding, with valid (B, T) False, neither writes nor decays."""
        hidden = ~valid[:, None, :, None]
        return self._replace(k=self.k.masked_fill(hidden, 0.0), decay=self.decay.masked_fill(hidden, 0.0))


def read_causal(terms: Terms, chunk: int) -> Tensor:
    """Return o_t = S_t^T q_t, (B, H, T, V), for all t."""
    return _read(terms, chunk, from_end=False)


def read_both_ways(forward: Terms, backward: Terms, chunk: int) -> Tensor:
    """Return S_t^T q_t + (A_t S'_t+1)^T q'_t, (B, H, T, V); S' and q' are sums and queries of `backward`, from its end.

    Both sequences are in the order of the text. The second read leaves the token itself out.
    """
    if forward is backward and forward.beta is None:
        return decayed_reads((False, True), chunk, *forward[:4])
    return _read(forward, chunk, from_end=False) + _read(backward, chunk, from_end=True)


def _read(terms: Terms, chunk: int, *, from_end: bool) -> Tensor:
    if terms.beta is None:
        return decayed_reads((from_end,), chunk, *terms[:4])
    return corrected_reads(from_end, chunk, *terms[:4], terms.beta)


def sums_after(terms: Terms, chunk: int) -> Tensor:
    """Return the sums (B, H, K, V) after the last position."""
    if terms.beta is None:
        return decayed_sums(chunk, *terms[1:4])
    return corrected_sums(chunk, *terms[1:4], terms.beta)


def read_next(token: Terms, sums: Tensor) -> Tensor:
    """Return the outputs (B, H, 1, V) of one more token, which is written into the sums (B, H, K, V) in place."""
    with torch.autocast(sums.device.type, enabled=False):
        sums.mul_(token.decay.exp().mT)
        written = token.v if token.beta is None else token.beta * (token.v - token.k @ sums)
        return token.q @ sums.addcmul_(token.k.mT, written)


def read_newest(token: Terms, state: State) -> tuple[Tensor, State]:
    """Return the outputs (B, H, N, V) of one more token of each hypothesis, and the recent sums with it.

    The terms are (B, H, N, ...), with decays of heads.
    """
    with torch.autocast(token.q.device.type, enabled=False):
        state, q = fade(state, token.decay), token.q.unsqueeze(2)
        if token.beta is not None:
            heads, state = corrected_next(q, token.k, token.v, token.beta, state)
        else:
            state = add_recent(state, token.k, token.v)
            heads = read_recent(state, q)
        return heads.squeeze(2), state


def read_literally(terms: Terms, *, excluding: bool = False) -> tuple[Tensor, Tensor]:
    """Return the reads (B, H, T, V) and the last sums by the recurrence itself; for tests.

    excluding: read A_t S_t-1, without the token itself.
    """
    sums = terms.k.new_zeros(*terms.k.shape[:2], terms.k.shape[-1], terms.v.shape[-1])
    outputs = []
    for t in range(terms.k.shape[2]):
        k, written = terms.k[:, :, t], terms.v[:, :, t]
        faded = terms.decay[:, :, t].exp().unsqueeze(-1) * sums
        if terms.beta is not None:
            written = terms.beta[:, :, t] * (written - torch.einsum("bhkv,bhk->bhv", faded, k))
        sums = faded + torch.einsum("bhk,bhv->bhkv", k, written)
        outputs.append(torch.einsum("bhkv,bhk->bhv", faded if excluding else sums, terms.q[:, :, t]))
    return torch.stack(outputs, dim=2), sums
