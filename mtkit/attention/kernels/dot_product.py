"""Scaled dot-product attention over whole sequences and for one step, with grouped heads and relative positions.

Scores and softmax are computed in float32 at least. A query that sees no key gets zero, not NaN or an average over
padding.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.cached_rows import attend_cached, cached_is_faster, supports_cached
from mtkit.attention.kernels.fused import fused_attention, hides_all_keys, padding_bias
from mtkit.attention.kernels.gpu.short import attend_short, attends_short
from mtkit.attention.slots import Placed, Positions
from mtkit.recording import kept

FEW = 15
"""Keys up to which a core reads a sequence faster row by row than by the fused kernel, which takes 16 at a time, in
inference mode."""


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
    """The heads' outputs (B, H, T, V), and on request the weights (B, H, T, S).

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V) where G and G' divide H; valid (B, S), or which keys each query may
    see, (B, T, S). Causal queries and keys have the same positions. Padding is on the right, so the causal mask
    already hides it from every real query.
    """
    by_query = valid is not None and valid.dim() == 3
    # only in inference mode: a pass that is run again with gradients must be the same to the last digit
    few = k.shape[2] <= FEW and torch.is_inference_mode_enabled() and torch.get_num_threads() == 1
    if few and is_plain(positions) and supports_cached(q, k, v) and not (causal or dropout or need_weights):
        visible = None if valid is None else valid.unsqueeze(2) if by_query else valid[:, None, None]
        heads = attend_cached(q.transpose(1, 2), k.unsqueeze(1), v.unsqueeze(1), scale=scale, visible=visible)
        return heads.transpose(1, 2), None
    if need_weights or (positions is not None and positions.on_values):
        visible, relative = visible_keys(q, k, causal, valid), placed(positions, q, k)
        return weigh(scores_of(q, k, scale), q, v, relative, scale=scale, visible=visible, dropout=dropout)
    if is_plain(positions) and not by_query and hides_all_keys(q):
        return _attend_on_gpu(q, k, v, None if causal else valid, scale=scale, causal=causal, dropout=dropout), None
    relative = placed(positions, q, k)
    bias = None if relative is None else relative.bias(q, scale)
    if valid is None or (causal and not by_query):
        if bias is None:
            return _fused_by_group(q, k, v, scale=scale, dropout=dropout, is_causal=causal), None
        mask = bias.masked_fill(~_triangle(q, k), float("-inf")) if causal else bias
        return _fused_by_group(q, k, v, scale=scale, dropout=dropout, mask=mask), None
    visible = valid[:, None] & _triangle(q, k) if causal else valid[:, None] if by_query else valid[:, None, None]
    return attend_visible(q, k, v, visible, bias, scale=scale, dropout=dropout), None


def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, *, scale: float, dropout: float
) -> Tensor:
    """The heads' outputs (B, H, T, V) if each query sees the keys of `visible`, by the fused kernel.

    visible and bias, which is added to the scores, broadcast to (B, H, T, S).
    """
    some = visible.any(-1, keepdim=True)  # (B, 1 or H, 1 or T, 1)
    # some kernels give NaN for a row without any key: it sees all keys, and its output is cleared
    mask = visible | ~some
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf"))
    return _fused_by_group(q, k, v, scale=scale, dropout=dropout, mask=mask) * some


def _attend_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *, scale: float, causal: bool, dropout: float
) -> Tensor:
    """The heads' outputs of `attend` by queries that see the keys of valid (B, S), or those up to their position."""
    if not dropout and attends_short(q, k, v):
        return attend_short(q, k, v, valid, scale=scale, causal=causal)
    mask = None if valid is None else padding_bias(valid, q.dtype)
    return _fused_by_group(q, k, v, scale=scale, dropout=dropout, mask=mask, is_causal=causal)


def placed(positions: Positions | None, q: Tensor, k: Tensor) -> Placed | None:
    """The positions of whole sequences, queries (..., T, K) and keys (..., S, K), which begin at 0."""
    return None if positions is None else Placed(positions, _range(q), _range(k))


def is_plain(positions: Positions | None) -> bool:
    """Whether positions add nothing to scores and outputs."""
    return positions is None or not (positions.on_scores or positions.on_values)


def safe_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the last axis where `visible`, zero elsewhere; a row without visible entries is zero.

    Hidden entries may hold any value. A row with a visible NaN is NaN.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if visible is None:
        return scores.softmax(-1, dtype=dtype)
    # masked by replacement, which no logit is large enough to overcome; `masked_fill` is slower on the CPU
    weights = scores.where(visible, torch.finfo(scores.dtype).min).softmax(-1, dtype=dtype)
    # a product is faster still, but would make NaN of a gradient that is infinite where nothing is to be seen; dropout
    # draws in the order of memory, which must be that of the product in a pass that is run again with gradients
    return weights.where(visible, 0.0).contiguous() if weights.requires_grad else weights * visible


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least: sums over positions need more than the 8 significant bits of bfloat16."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def scores_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled products (B, H, T, S) of q (B, H, T, K) and k (B, G, S, K); groups of neighbouring heads share keys."""
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


def weigh(
    scores: Tensor,
    q: Tensor,
    v: Tensor,
    positions: Placed | None,
    *,
    scale: float,
    visible: Tensor | None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, H, T, V) and the weights before dropout, from scaled scores (B, H, T, S).

    q (B, H, T, K), v (B, G, S, V); visible broadcasts to the scores.
    """
    weights = weights_of(scores, q, positions, scale=scale, visible=visible)
    return outputs_of(weights, v, positions, dropout), weights


def weights_of(scores: Tensor, q: Tensor, positions: Placed | None, *, scale: float, visible: Tensor | None) -> Tensor:
    """The first half of `weigh`: the weights (B, H, T, S)."""
    bias = None if positions is None else positions.bias(q, scale)
    return safe_softmax(scores if bias is None else upcast(scores) + bias, visible)


def outputs_of(weights: Tensor, v: Tensor, positions: Placed | None, dropout: float = 0.0) -> Tensor:
    """The second half of `weigh`: the heads' outputs (B, H, T, V)."""
    dropped = F.dropout(weights, dropout) if dropout else weights
    heads = weighted(dropped, v)
    extra = None if positions is None else positions.values(dropped)
    return heads if extra is None else heads + extra.type_as(heads)


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
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One new token of each hypothesis: outputs (B, N, H, V) and on request the weights (B, H, N, L).

    q (B, N, H, K). Keys and values of each hypothesis are (B, N, G, L, K); those all hypotheses share, (B, G, L, K).
    visible broadcasts to (B, N, H, L); key_position (L,), 0 to L - 1 if None.
    """
    batch, hypotheses = q.shape[:2]
    queries, only_output = hypotheses if keys.dim() == 4 else 1, is_plain(positions) and not need_weights
    if only_output and supports_cached(q, keys, values) and cached_is_faster(q, keys, queries):
        past = (keys.unsqueeze(1), values.unsqueeze(1)) if keys.dim() == 4 else (keys, values)
        return attend_cached(q, *past, scale=scale, visible=visible), None
    if visible is not None and keys.dim() == 4:
        visible = visible.transpose(1, 2)
    elif visible is not None:
        visible = visible.expand(batch, hypotheses, -1, -1).flatten(0, 1).unsqueeze(2)
    rows, keys, values = step_rows(q, keys, values)
    relative = None
    if positions is not None:
        here = numbers(query_position, query_position + 1, q.device)
        relative = Placed(positions, here, _range(keys) if key_position is None else key_position)
    heads, weights = weigh(scores_of(rows, keys, scale), rows, values, relative, scale=scale, visible=visible)
    heads = by_hypotheses(heads, hypotheses).transpose(1, 2)
    return heads, by_hypotheses(weights, hypotheses) if need_weights else None


def step_rows(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a step in the layout of sequences: q (B, N, H, K), caches (B, N, G, L, K) or shared (B, G, L, K).

    With shared keys the hypotheses are the queries of a segment, (B, H, N, K); else each hypothesis is a segment of its
    own with one query, (B*N, H, 1, K).
    """
    if keys.dim() == 4:
        return q.transpose(1, 2), keys, values
    return q.flatten(0, 1).unsqueeze(2), keys.flatten(0, 1), values.flatten(0, 1)


def by_hypotheses(rows: Tensor, hypotheses: int) -> Tensor:
    """Results in the layout of `step_rows`, (B, H, N, V) or (B*N, H, 1, V), as (B, H, N, V)."""
    if rows.shape[2] == hypotheses:
        return rows
    return rows.squeeze(2).unflatten(0, (-1, hypotheses)).transpose(1, 2)


def visible_keys(q: Tensor, k: Tensor, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Whether each query may see each key, broadcastable to (B, H, T, S), or None if all may see all."""
    if valid is not None and valid.dim() == 3:
        return valid.unsqueeze(1) & _triangle(q, k) if causal else valid.unsqueeze(1)
    if causal:
        return _triangle(q, k)
    return None if valid is None else valid[:, None, None, :]


def _fused_by_group(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The fused kernel, with keys and values for groups of heads."""
    heads = q.shape[1]
    return fused_attention(q, expand_heads(k, heads), expand_heads(v, heads), **how)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, ...) as (B, heads, ...), one of G per group of neighbouring heads; a copy only if 1 < G < heads."""
    groups = x.shape[1]
    if groups == heads:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // groups, *[-1] * (x.dim() - 2)).flatten(1, 2)


def numbers(begin: int, end: int, device: torch.device) -> Tensor:
    """The integers begin to end - 1, a view of a kept tensor that nobody may write to: a step needs them per layer."""
    return _kept_numbers(1 << max(end - 1, 1).bit_length(), device)[begin:end]


def position_of(count: int | Tensor, device: torch.device) -> Tensor:
    """The position (1,) after `count` tokens, given as a number or a tensor (B, N) of equal numbers."""
    return count[0, :1] if isinstance(count, Tensor) else numbers(count, count + 1, device)


@kept(8)
def _kept_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _range(x: Tensor) -> Tensor:
    return numbers(0, x.shape[-2], x.device)


def _triangle(q: Tensor, k: Tensor) -> Tensor:
    return _range(q).unsqueeze(-1) >= _range(k)
