"""Attention through feature maps: the engine of every mechanism whose similarity is a product of features.

With sim(q, k) = phi(q) . phi(k), the sums over the visible keys S = sum phi(k) v^T and z = sum phi(k) are all that a
query needs: o = phi(q) S / (phi(q) . z). A mechanism brings the features; here they are summed, over a whole memory,
over every prefix (in parts), or token by token. The scores of all queries with all keys never stand in memory.

S and z are one tensor, "sums" (B, G, M, V + 1), for M features: z is the sum over values that are one. Heads in
neighbouring groups may share keys and values (G of H). A key that must not count has zero features: a zero key or
value would not do, since phi(0) is not zero and z would still count it. Sums are in float32 at least, under autocast
too: bfloat16 stops counting at 256.

Features that are exponentials would overflow. They come with a log scale c_j for each key, phi(k_j) = features_j e^c_j,
and everything is summed relative to the largest scale of the visible keys. In the decoder that is the running maximum
C_i = max of c_j over j <= i, as in the online softmax: sums in hand shrink by e^(C_before - C_after) when it rises. It
cancels between numerator and denominator exactly, so that no later key moves an earlier output. A query's own scale
cancels too, and never comes here. `eps` is added to the denominator; `floor` is the least size that it may have,
relative to the scale of the largest key.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.dot_product import spread, widened
from mtkit.attention.engines.sums.prefix_products import Factors, prefix_products
from mtkit.attention.engines.sums.recurrence import Part, recur


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive: x + 1 above zero, exp(x) below (Katharopoulos et al., 2020, equation 7)."""
    return F.relu(x) + x.clamp(max=0.0).exp()  # not F.elu(x) + 1, which rounds exp(-10) to 3 digits


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu1": elu1, "relu": F.relu}
"""The feature maps without parameters, by name."""


class Keys(NamedTuple):
    """The features of keys, with their log scale where they have one."""

    features: Tensor
    """(B, G, S, M); zero for a key that must not count."""
    scale: Tensor | None = None
    """(B, G, S, 1), phi(k) = features * exp(scale); `nowhere` for a key that must not count. None: 0 throughout."""


def nowhere(x: Tensor) -> float:
    """A log scale below that of every key, in the type of x; finite, so that its difference to itself is 0."""
    return torch.finfo(x.dtype).min / 4


def attend_all(phi_q: Tensor, phi_k: Tensor | Keys, v: Tensor, *, eps: float = 0.0, floor: float = 0.0) -> Tensor:
    """Every query sees every key: (B, H, T, V) from phi_q (B, H, T, M), phi_k (B, G, S, M), v (B, G', S, V)."""
    return read(phi_q, sums_of(phi_k, v), eps=eps, floor=floor, like=v)


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Callable[[Tensor], Keys],
    *,
    valid: Tensor | None = None,
    eps: float = 0.0,
    floor: float = 0.0,
    chunk: int,
) -> Tensor:
    """Every query sees the keys up to its own position: (B, H, T, V); time and memory O(T).

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V), valid (B, T) where keys count. Their features are made part by
    part. Inside a part their products are written out under the triangle; what lies before it comes from sums.
    """
    groups = max(k.shape[1], v.shape[1])
    rows = [q.unflatten(1, (groups, -1)).flatten(0, 1), *(spread(x, groups).flatten(0, 1) for x in (k, v))]
    if valid is not None:
        rows.append(spread(valid[:, None, :, None], groups).flatten(0, 1))

    def step(_: Part, sequences: list[Tensor], __: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v, *valid = sequences  # (N, R, c, K), (N, c, K), (N, c, V): the heads of a group share its keys
        phi_q, (phi_k, scale) = features(q).features.flatten(1, 2), masked(features(k), *valid)
        v1 = F.pad(widened(v), (0, 1), value=1.0)
        if scale is None:
            total, *after = prefix_products(phi_q, phi_k, v1, state[0])
        else:
            top = state[1] if scale.requires_grad else state[1].detach()
            tops = torch.maximum(scale.cummax(1).values, top)  # what each row is relative to
            factors = _factors(scale.detach(), top.detach(), tops.detach(), q.shape[1])
            if scale.requires_grad:
                phi_k = phi_k * _one(scale)
            total, sums = prefix_products(phi_q, phi_k, v1, state[0], factors)
            if scale.requires_grad:
                total = total * _one(-tops).repeat(1, q.shape[1], 1)
            after = [sums, tops[:, -1:]]
        return _normalised(total, eps, floor).view(*q.shape[:-1], -1), after

    made = features(k[:1, :1, :1].detach())
    nothing = made.features.new_zeros(len(rows[1]), made.features.shape[-1], v.shape[-1] + 1)
    top = [] if made.scale is None else [nothing.new_full((len(nothing), 1, 1), nowhere(nothing))]
    heads, _ = recur(step, rows, [nothing, *top], chunk=chunk)
    return heads.unflatten(0, (-1, groups)).flatten(1, 2).type_as(v)


def sums_of(phi_k: Tensor | Keys, v: Tensor) -> Tensor:
    """The sums (B, G, M, V + 1) over all keys, in float32 at least; relative to the largest scale, if there is one."""
    with torch.autocast(v.device.type, enabled=False):
        phi_k, v1, scale = _paired(phi_k, v)
        if scale is not None:
            phi_k = phi_k * (scale - scale.amax(2, keepdim=True)).exp()
        return phi_k.transpose(-1, -2) @ v1


def read(phi_q: Tensor, sums: Tensor, *, eps: float = 0.0, floor: float = 0.0, like: Tensor) -> Tensor:
    """What queries phi_q (B, H, T, M) get from sums (B, G, M, V + 1): (B, H, T, V) in the type of `like`."""
    with torch.autocast(like.device.type, enabled=False):
        groups = sums.shape[1]
        rows = widened(phi_q).unflatten(1, (groups, -1))  # (B, G, R, T, M)
        total = (rows.flatten(2, 3) @ sums).unflatten(2, rows.shape[2:4]).flatten(1, 2)
        return _normalised(total, eps, floor).type_as(like)


def attend_next(
    phi_q: Tensor,
    phi_k: Tensor | Keys,
    v: Tensor,
    sums: Tensor,
    top: Tensor | None = None,
    *,
    eps: float = 0.0,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One step: the outputs (B, H, 1, V) of the newest token, and the sums with it added, in place.

    phi_q (B, H, 1, M), phi_k (B, G, 1, M), v (B, G', 1, V), sums (B, G, M, V + 1). Where keys have a scale, `top`
    (B, G, 1, 1) is the largest so far, `nowhere` at the start; it is raised in place too.
    """
    if top is None:
        sums.add_(sums_of(phi_k, v))
    else:
        features, v1, scale = _paired(phi_k, v)
        assert scale is not None
        raised = torch.maximum(top, scale)
        sums.mul_((top - raised).exp()).add_((features * (scale - raised).exp()).transpose(-1, -2) @ v1)
        top.copy_(raised)
    return read(phi_q, sums, eps=eps, floor=floor, like=v), sums


def masked(keys: Keys, valid: Tensor | None = None) -> Keys:
    """Keys that do not count where `valid`, which broadcasts to their scale, is False."""
    if valid is None:
        return keys
    scale = None if keys.scale is None else keys.scale.masked_fill(~valid, nowhere(keys.scale))
    return Keys(keys.features.masked_fill(~valid, 0.0), scale)


def guarded(denominator: Tensor, eps: float, floor: Tensor | float) -> Tensor:
    """The denominator with eps added, moved away from zero to `floor` on its own side."""
    denominator = denominator + eps
    if isinstance(floor, float) and not floor:
        return denominator
    return torch.where(denominator < 0, -1.0, 1.0) * denominator.abs().clamp(min=floor)


def _paired(phi_k: Tensor | Keys, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features and values with as many heads each, the values with a one at the end, and scales; float32 at least."""
    features, scale = phi_k if isinstance(phi_k, Keys) else Keys(phi_k)
    groups = max(features.shape[1], v.shape[1])
    features, v = spread(widened(features), groups), spread(widened(v), groups)
    return features, F.pad(v, (0, 1), value=1.0), None if scale is None else spread(scale, groups)


def _factors(scale: Tensor, before: Tensor, tops: Tensor, queries: int) -> Factors:
    """For keys of a scale (N, c, 1), the largest before them (N, 1, 1), those of each row (N, c, 1), and queries."""
    last = tops[:, -1:]  # what the sums after are relative to
    pairs, read = (scale.mT - tops).exp().tril(), (before - tops).exp()
    return Factors(pairs.repeat(1, queries, 1), read.repeat(1, queries, 1), (before - last).exp(), (scale - last).exp())


def _one(exponent: Tensor) -> Tensor:
    """1, with the gradient of exp(exponent) relative to itself."""
    return (exponent - exponent.detach()).exp()


def _normalised(total: Tensor, eps: float, floor: float) -> Tensor:
    """The sums over values divided by the sum over ones."""
    return total[..., :-1] / guarded(total[..., -1:], eps, floor)
