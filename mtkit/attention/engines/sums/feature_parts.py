"""Products of features over a long memory, part by part, so that the features of all positions are never held.

The sums over keys are made from one part of the keys after the other, then read by one part of the queries after the
other. The features of a part are computed where they are needed, and again in the backward pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.dot_product import spread, widened
from mtkit.attention.engines.sums.feature_sums import Keys, normalised, nowhere
from mtkit.attention.engines.sums.recurrence import Part, recur


def attend_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Callable[..., Keys],
    *,
    parameters: Sequence[Tensor] = (),
    valid: Tensor | None = None,
    eps: float = 0.0,
    floor: float | Tensor = 0.0,
    chunk: int,
) -> Tensor:
    """Every query sees every key: (B, H, T, V) from q (B, H, T, K), k (B, G, S, K), v (B, G', S, V); O(T + S).

    valid (B, S) where keys count; `features` and `parameters` as in `attend_causal`, `eps` and `floor` as in
    `feature_sums`, where `floor` has no axis of queries.
    """
    groups = max(k.shape[1], v.shape[1])
    by_head = [spread(x.expand(len(q), *x.shape), groups).flatten(0, 1) for x in parameters]
    keys = [spread(x, groups).flatten(0, 1) for x in (k, v)]
    if valid is not None:
        keys.append(spread(valid[:, None, :, None], groups).flatten(0, 1))

    def add(part: Part, own: list[Tensor], constants: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        phi_k, scale = features(own[0], *constants)  # (N, c, M), (N, c, 1)
        v1 = F.pad(widened(own[1]), (0, 1), value=1.0)
        if valid is not None:
            v1 = v1.masked_fill(~own[2], 0.0)
        nothing = v1.new_empty(*v1.shape[:-1], 0)
        if scale is None:
            return nothing, [torch.baddbmm(state[0], phi_k.mT, v1)]
        if valid is not None:
            scale = scale.masked_fill(~own[2], nowhere(scale))
        top = torch.maximum(state[1], scale.amax(1, keepdim=True))
        return nothing, [torch.baddbmm(state[0] * (state[1] - top).exp(), phi_k.mT, v1 * (scale - top).exp()), top]

    def read(
        part: Part, own: list[Tensor], constants: list[Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        sums, least, *of_head = constants
        phi_q = features(own[0], *(x.unsqueeze(1) for x in of_head)).features  # (N, R, c, M)
        total = phi_q.flatten(1, 2) @ sums
        return normalised(total, eps, least).view(*own[0].shape[:-1], -1), []

    one = features(k[:1, :1, :1].detach(), *(x[:1].detach() for x in parameters))
    start = [one.features.new_zeros(1, one.features.shape[-1], v.shape[-1] + 1).expand(len(keys[0]), -1, -1)]
    if one.scale is not None:  # above the keys that are nowhere, also if all are
        start.append(start[0].new_full((len(keys[0]), 1, 1), nowhere(start[0]) / 2))
    _, after = recur(add, keys, start, constants=by_head, chunk=chunk)
    least = torch.as_tensor(floor, dtype=after[0].dtype, device=q.device).expand(len(q), groups, 1, 1).flatten(0, 1)
    rows = [q.unflatten(1, (groups, -1)).flatten(0, 1)]
    heads, _ = recur(read, rows, [], constants=[after[0], least, *by_head], chunk=chunk)
    return heads.unflatten(0, (-1, groups)).flatten(1, 2).type_as(v)
