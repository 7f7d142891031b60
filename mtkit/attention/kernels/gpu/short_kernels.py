# mypy: ignore-errors
"""Attention over few keys in Triton, which PyTorch brings along for CUDA; `short` imports and calls these kernels.

A program has all queries and keys of one head of one segment, in a tile of SIDE x SIDE scores. The backward pass
computes the weights again, so that neither they nor sums of them are stored.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(x, batch, head, length, b, h, t, WIDTH: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """The places (SIDE, COLUMNS) of a head's rows in a tensor (B, H, T, WIDTH) of these strides, and which exist."""
    row, column = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
    at = x + batch.to(tl.int64) * b + head * h + row[:, None] * t + column[None, :]
    return at, (row < length)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _weights(q, k, valid, batch, queries, keys, scale, CAUSAL: tl.constexpr, MASKED: tl.constexpr, SIDE: tl.constexpr):
    """softmax(q k^T scale) over the keys that are seen; a query that sees none has no weights."""
    i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
    real = j < keys
    if MASKED:
        real = real & (tl.load(valid + batch * keys + j, real, 0) != 0)
    seen = (i < queries)[:, None] & real[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1e30)
    weights = tl.where(seen, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
    total = tl.sum(weights, 1)
    return weights / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend(
    q,
    k,
    v,
    valid,
    out,
    queries,
    keys,
    heads,
    scale,
    qb,
    qh,
    qt,
    kb,
    kh,
    kt,
    vb,
    vh,
    vt,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """out (B, T, H, VALUE) = softmax(q k^T scale) v."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    q_at, q_real = _rows(q, batch, head, queries, qb, qh, qt, KEY, SIDE, KEYS)
    k_at, k_real = _rows(k, batch, head, keys, kb, kh, kt, KEY, SIDE, KEYS)
    v_at, v_real = _rows(v, batch, head, keys, vb, vh, vt, VALUE, SIDE, VALUES)
    q_, k_, v_ = tl.load(q_at, q_real, 0.0), tl.load(k_at, k_real, 0.0), tl.load(v_at, v_real, 0.0)
    weights = _weights(q_, k_, valid, batch, queries, keys, scale, CAUSAL, MASKED, SIDE)
    at, real = _rows(out, batch, head, queries, queries * heads * VALUE, VALUE, heads * VALUE, VALUE, SIDE, VALUES)
    tl.store(at, tl.dot(weights.to(v_.dtype), v_), real)


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend_backward(
    q,
    k,
    v,
    valid,
    upstream,
    d_q,
    d_k,
    d_v,
    queries,
    keys,
    heads,
    scale,
    qb,
    qh,
    qt,
    kb,
    kh,
    kt,
    vb,
    vh,
    vt,
    ub,
    uh,
    ut,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradients of q, k and v, as (B, T, H, width)."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    q_at, q_real = _rows(q, batch, head, queries, qb, qh, qt, KEY, SIDE, KEYS)
    k_at, k_real = _rows(k, batch, head, keys, kb, kh, kt, KEY, SIDE, KEYS)
    v_at, v_real = _rows(v, batch, head, keys, vb, vh, vt, VALUE, SIDE, VALUES)
    u_at, u_real = _rows(upstream, batch, head, queries, ub, uh, ut, VALUE, SIDE, VALUES)
    q_, k_, v_ = tl.load(q_at, q_real, 0.0), tl.load(k_at, k_real, 0.0), tl.load(v_at, v_real, 0.0)
    given = tl.load(u_at, u_real, 0.0)
    weights = _weights(q_, k_, valid, batch, queries, keys, scale, CAUSAL, MASKED, SIDE)
    at, real = _rows(d_v, batch, head, keys, keys * heads * VALUE, VALUE, heads * VALUE, VALUE, SIDE, VALUES)
    tl.store(at, tl.dot(tl.trans(weights.to(given.dtype)), given), real)
    product = tl.dot(given, tl.trans(v_)) * weights
    d_scores = ((product - weights * tl.sum(product, 1)[:, None]) * scale).to(q_.dtype)
    at, real = _rows(d_q, batch, head, queries, queries * heads * KEY, KEY, heads * KEY, KEY, SIDE, KEYS)
    tl.store(at, tl.dot(d_scores, k_), real)
    at, real = _rows(d_k, batch, head, keys, keys * heads * KEY, KEY, heads * KEY, KEY, SIDE, KEYS)
    tl.store(at, tl.dot(tl.trans(d_scores), q_), real)
