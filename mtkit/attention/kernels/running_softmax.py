"""One softmax over keys in several parts, joined by log-sum-exp, and over every prefix of the keys in linear time.

The softmax over a prefix, for a query that is independent of position, is kept as its mean and the log of its sum.
Two of them over disjoint keys join exactly.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtkit.attention.contract import State
from mtkit.attention.kernels.dot_product import safe_softmax, scores_of, upcast, weighted


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
    """The outputs (..., V) and log-sum-exp (..., 1) over the keys of all parts, from each part's."""
    if len(parts) == 1:
        return parts[0]
    heads, sums = (torch.stack(part) for part in zip(*parts, strict=True))
    shares = sums.softmax(0)  # a part's sum of exponentials, relative to that of all
    return (heads * shares).sum(0).type_as(heads), sums.logsumexp(0)


def softmax_with_sum(
    q: Tensor, k: Tensor, scale: float, visible: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weights (B, H, ..., T, S) and the log-sum-exp (..., T, 1) of the scores, in float32 at least."""
    scores = upcast(scores_of(q, k, scale))
    scores = scores if bias is None else scores + bias
    shown = scores if visible is None else scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return safe_softmax(scores, visible), shown.logsumexp(-1, keepdim=True)


def join(log_sum: Tensor, mean: Tensor, other_log_sum: Tensor, other_mean: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum (...) and mean (..., V) over the keys of both parts."""
    total = torch.logaddexp(log_sum, other_log_sum)
    share, other_share = ((log - total).exp().unsqueeze(-1) for log in (log_sum, other_log_sum))
    return total, mean * share + other_mean * other_share


CHUNK = 64


def read_prefixes(
    read: Callable[..., Tensor], scores: Tensor, values: Tensor, *rows: Tensor, chunk: int = CHUNK
) -> Tensor:
    """The results (..., T, Z) of `read(means, *rows)` on the mean over each prefix, `chunk` positions at a time.

    scores (..., T) and values (..., T, V) have leading axes that broadcast. `read` gets means (..., c, V) in float32 at
    least, and rows (..., T, X) as (..., c, X). The backward pass computes the means and the intermediate results of
    each part again, so that memory holds only one part's. `read` may use parameters and draw dropout.
    """
    width = values.shape[-1]
    log_sum = upcast(scores).new_full(scores.shape[:-1], _nothing(upcast(scores)))
    mean = log_sum.new_zeros(*log_sum.shape, width)
    outputs = []
    for part in zip(scores.split(chunk, -1), *(x.split(chunk, -2) for x in (values, *rows)), strict=True):
        if torch.is_grad_enabled():
            results = checkpoint(_read_part, read, log_sum, mean, *part, use_reentrant=False)
        else:
            results = _read_part(read, log_sum, mean, *part)
        output, log_sum, mean = results
        outputs.append(output)
    return torch.cat(outputs, dim=-2)


def start_softmax(batch_size: int, hypotheses: int, *queries: int, width: int, like: Tensor) -> State:
    """The softmax over no keys, for decoding: "log_sum" (B, N, *queries) and "mean" (B, N, *queries, width)."""
    log_sum = upcast(like).new_full((batch_size, hypotheses, *queries), _nothing(upcast(like)))
    return {"log_sum": log_sum, "mean": log_sum.new_zeros(*log_sum.shape, width)}


def add_keys(state: State, scores: Tensor, values: Tensor) -> State:
    """The softmax with L more keys: scores (B, N, *queries, L), values (B, N, *queries, L, V), which broadcast.

    Its result is the "mean" of the state, which a single key changes in place.
    """
    with torch.autocast(scores.device.type, enabled=False):
        scores, values = upcast(scores), upcast(values)
        if scores.shape[-1] == 1 and not torch.is_grad_enabled():
            log_sum = torch.logaddexp(state["log_sum"], scores.squeeze(-1))
            share = (scores - log_sum.unsqueeze(-1)).exp()
            return {**state, "log_sum": log_sum, "mean": state["mean"].lerp_(values.squeeze(-2), share)}
        part_mean = (scores.softmax(-1).unsqueeze(-2) @ values).squeeze(-2)
        log_sum, mean = join(state["log_sum"], state["mean"], scores.logsumexp(-1), part_mean)
    return {**state, "log_sum": log_sum, "mean": mean}


def _read_part(
    read: Callable[..., Tensor], log_sum: Tensor, mean: Tensor, scores: Tensor, values: Tensor, *rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of one part, and the log-sum (...) and mean (..., V) after it, from those before it."""
    with torch.autocast(scores.device.type, enabled=False):
        s, v = upcast(scores), upcast(values)
        earlier = torch.ones(s.shape[-1], s.shape[-1], dtype=torch.bool, device=s.device).tril()
        part_mean = safe_softmax(s.unsqueeze(-2).expand(*s.shape[:-1], *earlier.shape), earlier) @ v
        sums, means = join(log_sum.unsqueeze(-1), mean.unsqueeze(-2), s.logcumsumexp(-1), part_mean)
    return read(means, *rows), sums[..., -1], means[..., -1, :]


def _nothing(like: Tensor) -> float:
    """The log of an empty sum; finite, so that two of them join."""
    return torch.finfo(like.dtype).min
