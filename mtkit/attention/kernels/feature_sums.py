"""Sums over keys for mechanisms whose similarity is a product of features.

With sim(q, k) = phi(q) . phi(k), a query needs only the sums S = sum phi(k) v^T and z = sum phi(k) over its visible
keys: o = phi(q) S / (phi(q) . z). A mechanism provides the features; they are summed over a memory, over
every prefix (in parts), or token by token. The scores of all pairs are never held in memory.

S and z are one tensor, "sums" (B, G, M, V + 1), for M features: z is the sum over values that are one. Groups of
neighbouring heads may share keys and values (G of H). A hidden key has zero features, a scale of `nowhere`, or neither
a value nor a one. A zero key would not be hidden, because phi(0) is not zero, nor would a zero value, because z counts
its one. Sums are in float32 at least, also under autocast: counts in bfloat16 stop at 256.

Exponential features would overflow. They have a log scale c_j per key, phi(k_j) = features_j e^c_j, and all sums are
relative to the largest scale of the visible keys. In the decoder that is the running maximum C_i = max of c_j over
j <= i, as in the online softmax: earlier sums shrink by e^(C_before - C_after) when it rises. The scale cancels between
numerator and denominator exactly, so that no later key changes an earlier output. The scale of a query cancels as well
and is not passed. Where sums fade (`Gates`), the scales of earlier keys fade with them. `eps` is added to the
denominator; `floor` is its minimum size relative to the scale of the largest key, one number or one for each query,
(B or 1, G or 1, T or 1, 1).

`attend_parts` sums over a long memory part by part, then reads the sums part by part, so that the features of all
positions are never held; the backward pass recomputes them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.cached_rows import attend_cached, cached_is_faster, supports_cached
from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.kernels.recurrence import Factors, Part, prefix_products, recur, triangle_products

_ONE = torch.ones(1)


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive: x + 1 above zero, exp(x) below (Katharopoulos et al., 2020, equation 7).

    Differentiable once.
    """
    y: Tensor = _Elu1.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Elu1(torch.autograd.Function):
    """elu1, which keeps only its result y for the backward pass: the derivative is min(y, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp(max=0.0).exp_().add_(F.relu(x))  # not F.elu(x) + 1, which rounds exp(-10) to 3 digits
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return d_y * y.clamp(max=1.0)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu1": elu1, "relu": F.relu}
"""The feature maps without parameters, by name."""


class Keys(NamedTuple):
    """The features of keys, with their log scale if they have one."""

    features: Tensor
    """(B, G, S, M); without a scale, zero for a key that must not count."""
    scale: Tensor | None = None
    """(B, G, S, 1), phi(k) = features * exp(scale); `nowhere` for a key that must not count. None: 0 throughout."""


class Gates(NamedTuple):
    """The gates of the sums at each position: S_t = e^kept_t S_t-1 + added_t phi(k_t) v_t^T, and z_t likewise."""

    kept: Tensor
    """(B, G, T, 1), logarithms: 0 at most."""
    added: Tensor
    """(B, G, T, 1)."""


def nowhere(x: Tensor) -> float:
    """A log scale below every key's, in the type of x; finite, so that its difference to itself is 0."""
    return torch.finfo(x.dtype).min / 4


def attend_all(
    phi_q: Tensor, phi_k: Tensor | Keys, v: Tensor, *, eps: float = 0.0, floor: float | Tensor = 0.0
) -> Tensor:
    """Every query sees every key: (B, H, T, V) from phi_q (B, H, T, M), phi_k (B, G, S, M), v (B, G', S, V)."""
    with torch.autocast(v.device.type, enabled=False):
        features, v1 = _summands(phi_k, v)
        (keys, width), values = features.shape[-2:], v1.shape[-1]
        rows = _by_group(phi_q, features.shape[1])
        short = keys * (width + values) < 2 * width * values  # similarities are fewer than sums
        total = rows @ features.mT @ v1 if short else rows @ (features.mT @ v1)
        return _outputs(total, phi_q, eps, floor).type_as(v)


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Callable[..., Keys],
    *,
    parameters: Sequence[Tensor] = (),
    gates: Gates | None = None,
    valid: Tensor | None = None,
    eps: float = 0.0,
    floor: float | Tensor = 0.0,
    chunk: int,
) -> Tensor:
    """Every query sees the keys up to its own position: (B, H, T, V); time and memory O(T).

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V), valid (B, T) where keys count. Features are computed part by part:
    `features(x, *parameters)` of x (..., c, K), with the parameters (G, X, Y) of its head as (..., X, Y). Pairs within
    a part are products under the triangle; earlier parts enter through their sums.
    """
    groups = max(k.shape[1], v.shape[1])
    rows = [q.unflatten(1, (groups, -1)).flatten(0, 1), *(expand_heads(x, groups).flatten(0, 1) for x in (k, v))]
    other = {"valid": None if valid is None else valid[:, None, :, None], **({} if gates is None else gates._asdict())}
    if isinstance(floor, Tensor):
        other["floor"] = floor.expand(len(q), -1, q.shape[2], -1)
    other = {name: expand_heads(x, groups).flatten(0, 1) for name, x in other.items() if x is not None}
    names, gated = tuple(other), gates is not None
    by_head = [expand_heads(x.expand(len(q), *x.shape), groups).flatten(0, 1) for x in parameters]

    def step(
        part: Part, sequences: list[Tensor], own: list[Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v = sequences[:3]  # (N, R, c, K), (N, c, K), (N, c, V): the heads of a group share its keys
        beside = dict(zip(names, sequences[3:], strict=True))
        phi_q = features(q, *(x.unsqueeze(1) for x in own)).features.flatten(1, 2)
        phi_k, scale = features(k, *own)
        v1 = F.pad(upcast(v), (0, 1), value=1.0)
        if "valid" in beside:  # what hidden keys add is zero: values are narrower than features
            v1 = v1.masked_fill(~beside["valid"], 0.0)
            scale = None if scale is None else scale.masked_fill(~beside["valid"], nowhere(scale))

        def made(total: Tensor) -> Tensor:
            least = beside["floor"].repeat(1, q.shape[1], 1) if "floor" in beside else floor
            return normalised(total, eps, least).view(*q.shape[:-1], -1)

        if not gated and scale is None:
            if part.is_whole:
                return made(triangle_products(phi_q, phi_k, v1)), []
            total, sums = prefix_products(phi_q, phi_k, v1, state[0])
            return made(total), [sums]
        if scale is None:
            scale = v1.new_zeros(*v1.shape[:-1], 1)
        faded = torch.zeros_like(scale)
        if gated:  # what each row finds faded away since the part began is as if later keys were larger
            phi_k, faded = phi_k * beside["added"], _faded(beside["kept"], beside.get("valid"))
            scale = scale - faded
        top = state[1] if scale.requires_grad else state[1].detach()
        tops = torch.maximum(scale.cummax(1).values, top)  # what each row is relative to
        pairs = _pairs(scale, tops, q.shape[1])
        if part.is_whole:
            return made(triangle_products(phi_q, phi_k, v1, pairs)), []
        total, sums = prefix_products(phi_q, phi_k, v1, state[0], _factors(scale, top, tops, pairs))
        return made(total), [sums, (tops + faded)[:, -1:]]

    one = features(k[:1, :1, :1].detach(), *(x[:1].detach() for x in parameters))
    nothing = one.features.new_zeros(1, one.features.shape[-1], v.shape[-1] + 1).expand(len(rows[1]), -1, -1)
    top = [nothing.new_full((len(nothing), 1, 1), nowhere(nothing))] if gated or one.scale is not None else []
    heads, _ = recur(step, [*rows, *other.values()], [nothing, *top], constants=by_head, chunk=chunk)
    return heads.unflatten(0, (-1, groups)).flatten(1, 2).type_as(v)


def sums_of(phi_k: Tensor | Keys, v: Tensor) -> tuple[Tensor, ...]:
    """The sums (B, G, M, V + 1) over all keys, in float32 at least; relative to the largest scale, if there is one.

    If features (B, G, S, M) and values (B, G, S, V + 1) are fewer numbers than the sums, these two, transposed features
    first: their product is the sums.
    """
    with torch.autocast(v.device.type, enabled=False):
        features, v1 = _summands(phi_k, v)
        (keys, width), values = features.shape[-2:], v1.shape[-1]
        return (features.mT, v1) if keys * (width + values) < width * values else (features.mT @ v1,)


def read(
    phi_q: Tensor, sums: Sequence[Tensor], *, eps: float = 0.0, floor: float | Tensor = 0.0, like: Tensor
) -> Tensor:
    """The outputs (B, H, T, V) of queries phi_q (B, H, T, M) from the result of `sums_of`, in the type of `like`."""
    with torch.autocast(like.device.type, enabled=False):
        if len(sums) > 1 and supports_cached(phi_q, *sums) and cached_is_faster(phi_q, sums[1], phi_q.shape[2]):
            past = (x.unsqueeze(1) for x in (sums[0].mT, sums[1]))
            total = attend_cached(phi_q.transpose(1, 2), *past, scale=1.0, factors=_ONE)
            return normalised(total.transpose(1, 2), eps, floor).type_as(like)
        total = _by_group(phi_q, sums[0].shape[1])
        for factor in sums:
            total = total @ factor
        return _outputs(total, phi_q, eps, floor).type_as(like)


def masked(keys: Keys, valid: Tensor | None = None) -> Keys:
    """The keys, hidden where `valid`, which broadcasts to their scale, is False."""
    if valid is None:
        return keys
    if keys.scale is None:
        return Keys(keys.features.masked_fill(~valid, 0.0))
    return keys._replace(scale=keys.scale.masked_fill(~valid, nowhere(keys.scale)))


def guarded(denominator: Tensor, eps: float, floor: Tensor | float) -> Tensor:
    """The denominator with eps added, and its absolute value raised to `floor`."""
    denominator = denominator + eps
    if isinstance(floor, float) and not floor:
        return denominator
    return torch.where(denominator < 0, -1.0, 1.0) * denominator.abs().clamp(min=floor)


def normalised(total: Tensor, eps: float, floor: float | Tensor) -> Tensor:
    """The sums over values divided by the sum over ones."""
    return total[..., :-1] / guarded(total[..., -1:], eps, floor)


def paired(phi_k: Tensor | Keys, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features and values with as many heads each, the values with a one at the end, and scales; float32 at least."""
    features, scale = phi_k if isinstance(phi_k, Keys) else Keys(phi_k)
    groups = max(features.shape[1], v.shape[1])
    features, v = expand_heads(upcast(features), groups), expand_heads(upcast(v), groups)
    return features, F.pad(v, (0, 1), value=1.0), None if scale is None else expand_heads(scale, groups)


def _summands(phi_k: Tensor | Keys, v: Tensor) -> tuple[Tensor, Tensor]:
    """Features and values (B, G, S, V + 1) whose products sum up; relative to the largest scale, if there is one."""
    features, v1, scale = paired(phi_k, v)
    if scale is None:
        return features, v1
    top = scale.amax(2, keepdim=True).clamp(min=nowhere(scale) / 2)  # above the keys that are nowhere, also if all are
    return features, v1 * (scale - top).exp()


def _by_group(phi_q: Tensor, groups: int) -> Tensor:
    """Queries (B, H, T, M) as rows (B, G, R T, M); heads that share keys are neighbours."""
    return upcast(phi_q).unflatten(1, (groups, -1)).flatten(2, 3)


def _outputs(total: Tensor, phi_q: Tensor, eps: float, floor: float | Tensor) -> Tensor:
    """The outputs (B, H, T, V), normalised, from the sums of `_by_group`."""
    return normalised(total, eps, floor).view(*phi_q.shape[:-1], total.shape[-1] - 1)


def _pairs(scale: Tensor, tops: Tensor, queries: int) -> Tensor:
    """Return each key's share of a scale (N, c, 1) in each row, relative to the row's (N, c, 1), for all queries."""
    # 0 at most under the triangle; above it, an infinite number would make no number of a gradient
    pairs = (scale.mT - tops).clamp(max=0.0).exp().tril()
    return pairs if queries == 1 else pairs.repeat(1, queries, 1)


def _factors(scale: Tensor, before: Tensor, tops: Tensor, pairs: Tensor) -> Factors:
    """For keys of a scale (N, c, 1), the largest before them (N, 1, 1), and the largest up to each row (N, c, 1)."""
    last = tops[:, -1:]  # what the sums after are relative to
    read = (before - tops).exp().repeat(1, pairs.shape[1] // tops.shape[1], 1)
    return Factors(pairs, read, (before - last).exp(), (scale - last).exp())


def _faded(decay: Tensor, valid: Tensor | None) -> Tensor:
    """The logarithm (..., c, 1) of the share of earlier sums left after each position; padding forgets nothing."""
    decay = upcast(decay)
    return (decay if valid is None else decay.masked_fill(~valid, 0.0)).cumsum(-2)


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
    `feature_sums`, except that `floor` has no axis of queries.
    """
    groups = max(k.shape[1], v.shape[1])
    by_head = [expand_heads(x.expand(len(q), *x.shape), groups).flatten(0, 1) for x in parameters]
    keys = [expand_heads(x, groups).flatten(0, 1) for x in (k, v)]
    if valid is not None:
        keys.append(expand_heads(valid[:, None, :, None], groups).flatten(0, 1))

    def add(part: Part, own: list[Tensor], constants: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        phi_k, scale = features(own[0], *constants)  # (N, c, M), (N, c, 1)
        v1 = F.pad(upcast(own[1]), (0, 1), value=1.0)
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
