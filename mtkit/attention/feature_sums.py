"""Attention through feature maps: the engine of every mechanism whose similarity is a product of features.

With sim(q, k) = phi(q) . phi(k), the sums over the visible keys S = sum phi(k) v^T and z = sum phi(k) are all that a
query needs: o = phi(q) S / (phi(q) . z). A mechanism brings the features; here they are summed, over a whole memory,
over every prefix at once (in chunks), or token by token. The scores of all queries with all keys never stand in memory.

S and z are one tensor, "sums" (B, G, M, V + 1), for M features: z is the sum over values that are one. Heads in
neighbouring groups may share keys and values (G of H). A key that must not count has zero features: a zero key or
value would not do, since phi(0) is not zero and z would still count it. Sums are in float32 at least, under autocast
too: bfloat16 stops counting at 256.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.dot_product import widened


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive: x + 1 above zero, exp(x) below (Katharopoulos et al., 2020, equation 7)."""
    return F.relu(x) + x.clamp(max=0.0).exp()  # not F.elu(x) + 1, which rounds exp(-10) to 3 digits


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu1": elu1, "relu": F.relu}
"""The feature maps without parameters, by name."""


def attend_all(phi_q: Tensor, phi_k: Tensor, v: Tensor, *, eps: float) -> Tensor:
    """Every query sees every key: (B, H, T, V) from phi_q (B, H, T, M), phi_k (B, G, S, M), v (B, G', S, V)."""
    return read(phi_q, sums_of(phi_k, v), eps=eps, like=v)


def attend_causal(phi_q: Tensor, phi_k: Tensor, v: Tensor, *, eps: float, chunk: int) -> Tensor:
    """Every query sees the keys up to its own position: shapes as in `attend_all`, S = T; time and memory O(T).

    Inside a chunk the products of features are written out under the triangle; what lies before the chunk comes from
    the sums of the chunks before it, all of them found by one running sum over T / chunk states.
    """
    with torch.autocast(v.device.type, enabled=False):
        length = phi_q.shape[2]
        chunk = min(chunk, length)
        k, v1 = (_chunks(x, chunk) for x in _paired(phi_k, v))  # (B, G, n, c, M), (B, G, n, c, V + 1)
        q = _chunks(widened(phi_q).unflatten(1, (k.shape[1], -1)), chunk)  # (B, G, R, n, c, M)
        rows = q.transpose(2, 3).flatten(3, 4)  # (B, G, n, R*c, M): the heads of a group share its keys
        triangle = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril().repeat(q.shape[2], 1)
        inside = (rows @ k.transpose(-1, -2)).masked_fill(~triangle, 0.0) @ v1
        sums = k.transpose(-1, -2) @ v1  # (B, G, n, M, V + 1), one for each chunk
        before = F.pad(sums[:, :, :-1].cumsum(2), (0, 0, 0, 0, 1, 0))
        total = (inside + rows @ before).unflatten(3, (-1, chunk)).transpose(2, 3)  # (B, G, R, n, c, V + 1)
        return _normalised(total.flatten(3, 4)[:, :, :, :length].flatten(1, 2), eps).type_as(v)


def sums_of(phi_k: Tensor, v: Tensor) -> Tensor:
    """The sums (B, G, M, V + 1) over all keys, in float32 at least."""
    with torch.autocast(v.device.type, enabled=False):
        phi_k, v1 = _paired(phi_k, v)
        return phi_k.transpose(-1, -2) @ v1


def read(phi_q: Tensor, sums: Tensor, *, eps: float, like: Tensor) -> Tensor:
    """What queries phi_q (B, H, T, M) get from sums (B, G, M, V + 1): (B, H, T, V) in the type of `like`."""
    with torch.autocast(like.device.type, enabled=False):
        groups = sums.shape[1]
        rows = widened(phi_q).unflatten(1, (groups, -1))  # (B, G, R, T, M)
        total = (rows.flatten(2, 3) @ sums).unflatten(2, rows.shape[2:4]).flatten(1, 2)
        return _normalised(total, eps).type_as(like)


def attend_next(phi_q: Tensor, phi_k: Tensor, v: Tensor, sums: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """One step: the outputs (B, H, 1, V) of the newest token, and the sums with it added, in place.

    phi_q (B, H, 1, M), phi_k (B, G, 1, M), v (B, G', 1, V), sums (B, G, M, V + 1).
    """
    sums.add_(sums_of(phi_k, v))
    return read(phi_q, sums, eps=eps, like=v), sums


def _paired(phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Features and values with as many heads each, the values with a one at the end, in float32 at least."""
    keys, values = phi_k.shape[1], v.shape[1]
    phi_k, v = widened(phi_k), widened(v)
    if keys != values:
        phi_k = phi_k.repeat_interleave(max(keys, values) // keys, 1)
        v = v.repeat_interleave(max(keys, values) // values, 1)
    return phi_k, F.pad(v, (0, 1), value=1.0)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """(..., T, X) to (..., n, c, X), the last chunk filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def _normalised(total: Tensor, eps: float) -> Tensor:
    """The sums over values divided by the sum over ones."""
    return total[..., :-1] / (total[..., -1:] + eps)
