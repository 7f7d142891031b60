"""One softmax over keys in several parts: the softmax of each part, joined by the log-sum-exp of the parts."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.dot_product import safe_softmax, scores_of, weighted, widened


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs (B, H, T, V) over the keys of one part, and their log-sum-exp (B, H, T, 1) for `join_parts`.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V); visible and bias broadcast to (B, H, T, S).
    """
    weights, log_sum = softmax_with_sum(q, k, scale, visible, bias)
    return weighted(F.dropout(weights, dropout) if dropout else weights, v), log_sum


def join_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The outputs (..., V) and log-sum-exp (..., 1) over the keys of all parts, from those of each part."""
    if len(parts) == 1:
        return parts[0]
    heads, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    shares = sums.softmax(0)  # a part's sum of exponentials, relative to that of all
    return (heads * shares).sum(0).type_as(heads), sums.logsumexp(0)


def softmax_with_sum(
    q: Tensor, k: Tensor, scale: float, visible: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weights (B, H, ..., T, S) and the log-sum-exp (..., T, 1) of the scores, in float32 at least."""
    scores = widened(scores_of(q, k, scale))
    scores = scores if bias is None else scores + bias
    shown = scores if visible is None else scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return safe_softmax(scores, visible), shown.logsumexp(-1, keepdim=True)


def join(log_sum: Tensor, mean: Tensor, other_log_sum: Tensor, other_mean: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum (...) and mean (..., V) over the keys of both parts."""
    total = torch.logaddexp(log_sum, other_log_sum)
    share, other_share = ((each - total).exp().unsqueeze(-1) for each in (log_sum, other_log_sum))
    return total, mean * share + other_mean * other_share
