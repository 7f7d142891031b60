"""Softmax of each query over a few keys of its own, without a matrix product."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.dot_product import safe_softmax, spread, widened

Key = tuple[Tensor, Tensor, Tensor | None]
"""One key for each query: keys (B, G, T or 1, K), values (B, G', T or 1, V), and whether it is seen, (B or 1, T)."""


def attend_few(q: Tensor, keys: Sequence[Key], *, scale: float, dropout: float = 0.0) -> Tensor:
    """The heads' outputs (B, H, T, V) of queries (B, H, T, K); one that sees no key gets zero."""
    heads = q.shape[1]
    scores = torch.stack([(widened(q) * spread(k, heads)).sum(-1) for k, _, _ in keys], dim=-1) * scale
    seen = [scores.new_ones(1, 1, dtype=torch.bool) if each is None else each for _, _, each in keys]
    visible = torch.stack(torch.broadcast_tensors(*seen), dim=-1).unsqueeze(1)  # (B or 1, 1, T, keys)
    weights = safe_softmax(scores, visible)
    dropped = (F.dropout(weights, dropout) if dropout else weights).type_as(keys[0][1])
    output, *others = [each * spread(v, heads) for each, (_, v, _) in zip(dropped.split(1, dim=-1), keys, strict=True)]
    for other in others:
        output = output + other
    return output
