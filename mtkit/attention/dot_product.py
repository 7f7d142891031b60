"""Scaled dot-product attention over whole sequences and for one step, with grouped heads and relative positions.

Scores and softmax are computed in float32 at least. A query that may see no key gets zero, never NaN and never an
average over padding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.slots import Positions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    positions: Positions | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs (B, H, T, V), and the weights (B, H, T, S) when asked for.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V) where G and G' divide H; valid (B, S). Causal queries and keys have
    the same positions; padding is on the right, so that the triangle alone hides it from every real query.
    """
    if need_weights or (positions is not None and positions.on_values):
        return _with_weights(q, k, v, scale, causal, valid, positions, dropout)
    bias = _bias(q, k, positions, scale)
    if valid is None or causal:
        if bias is None:
            return _fused(q, k, v, scale=scale, dropout=dropout, is_causal=causal), None
        mask = bias.masked_fill(~_triangle(q, k), float("-inf")) if causal else bias
        return _fused(q, k, v, scale=scale, dropout=dropout, mask=mask), None
    some = valid.any(-1)[:, None, None, None]  # (B, 1, 1, 1)
    # a row without any key is NaN in some kernels: let it see all, then clear what it saw
    mask = valid[:, None, None, :] | ~some
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf"))
    return _fused(q, k, v, scale=scale, dropout=dropout, mask=mask) * some, None


def safe_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the last axis where `visible`, zero elsewhere; a row without anything visible is zero."""
    scores = widened(scores)
    if visible is None:
        return scores.softmax(-1)
    # masked by replacement, so that no logit is large enough to overcome it
    masked = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return masked.softmax(-1).masked_fill(~visible, 0.0)


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: what is summed over positions needs more than the 8 significant bits of bfloat16."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def scores_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled products (B, H, T, S) of q (B, H, T, K) and k (B, G, S, K); neighbouring heads share the keys of a group."""
    groups = k.shape[1]
    if groups == q.shape[1]:
        return (q * scale) @ k.transpose(-1, -2)
    return ((q * scale).unflatten(1, (groups, -1)) @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Sums (B, H, T, V) of v (B, G, S, V) under weights (B, H, T, S)."""
    weights = weights.type_as(v)
    groups = v.shape[1]
    if groups == weights.shape[1]:
        return weights @ v
    return (weights.unflatten(1, (groups, -1)) @ v.unsqueeze(2)).flatten(1, 2)


def attend_step(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    positions: Positions | None = None,
    query_position: int = 0,
    key_position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One new token of each hypothesis: outputs (B, N, H, V) and weights (B, H, N, L).

    q (B, N, H, K). Keys and values of each hypothesis are (B, N, G, L, K); those all hypotheses share, (B, G, L, K).
    visible broadcasts to (B, N, H, L); key_position (L,).
    """
    shared = keys.dim() == 4
    hypotheses = q.shape[1]
    # shared: the hypotheses are the queries of one product; else each is a segment of its own with one query
    rows = q.transpose(1, 2) if shared else q.flatten(0, 1).unsqueeze(2)  # (B, H, N, K) or (B*N, H, 1, K)
    if not shared:
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    scores = scores_of(rows, keys, scale)
    where = torch.tensor([query_position], device=q.device) if positions is not None else None
    if positions is not None and where is not None and key_position is not None:
        bias = positions.bias(rows, where, key_position, scale)
        scores = scores if bias is None else widened(scores) + bias
    if visible is not None and shared:
        visible = visible.transpose(1, 2)
    elif visible is not None:
        visible = visible.expand(q.shape[0], hypotheses, -1, -1).flatten(0, 1).unsqueeze(2)
    weights = safe_softmax(scores, visible)
    heads = weighted(weights, values)
    if positions is not None and where is not None and key_position is not None:
        extra = positions.values(weights, where, key_position)
        heads = heads if extra is None else heads + extra.type_as(heads)
    if shared:
        return heads.transpose(1, 2), weights
    unfolded = weights.squeeze(2).unflatten(0, (-1, hypotheses)).transpose(1, 2)
    return heads.squeeze(2).unflatten(0, (-1, hypotheses)), unfolded


def visible_keys(q: Tensor, k: Tensor, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Which keys each query may see, broadcastable to (B, H, T, S), or None where it may see all."""
    if causal:
        return _triangle(q, k)
    return None if valid is None else valid[:, None, None, :]


def _with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    valid: Tensor | None,
    positions: Positions | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, scale)
    bias = _bias(q, k, positions, scale)
    if bias is not None:
        scores = widened(scores) + bias
    weights = safe_softmax(scores, visible_keys(q, k, causal, valid))
    dropped = F.dropout(weights, dropout) if dropout else weights
    heads = weighted(dropped, v)
    if positions is not None:
        extra = positions.values(dropped, _range(q), _range(k))
        heads = heads if extra is None else heads + extra.type_as(heads)
    return heads, weights


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    heads = q.shape[1]
    k, v = _spread(k, heads), _spread(v, heads)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.type_as(q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and q.shape[-2] > 1, scale=scale
    )


def _spread(x: Tensor, heads: int) -> Tensor:
    """(B, G, S, K) seen as (B, H, S, K); without a copy where one head serves all."""
    groups = x.shape[1]
    if groups == heads:
        return x
    if groups == 1:
        return x.expand(-1, heads, -1, -1)
    return x.unsqueeze(2).expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)


def _bias(q: Tensor, k: Tensor, positions: Positions | None, scale: float) -> Tensor | None:
    return None if positions is None else positions.bias(q, _range(q), _range(k), scale)


def _range(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2], device=x.device)


def _triangle(q: Tensor, k: Tensor) -> Tensor:
    return _range(q).unsqueeze(-1) >= _range(k)
