"""Attention over few keys on a GPU: one kernel for the forward pass, and one for the backward pass.

PyTorch's kernels divide queries and keys into tiles, keep sums for each, and add gradients of several tiles. A sentence
is one tile, over which all is computed from queries, keys and values at once (`short_kernels`). Scores and softmax are
in float32, the factors of products in the type of the inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.device import runs_kernels

LONGEST = 64
"""Most queries and keys."""

WIDEST = 64
"""Most numbers of a key or value: tiles of wider ones do not fit in the fast memory of every GPU."""


def attends_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_short` takes q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), of 16 bits on a GPU.

    Not in inference mode, whose shapes change too often to compile for; without gradients it takes them, because a pass
    that is run again with gradients must be the same.
    """
    return (
        q.is_cuda
        and not torch.is_inference_mode_enabled()
        and q.dtype != torch.float32
        and max(q.shape[2], k.shape[2]) <= LONGEST
        and max(q.shape[3], v.shape[3]) <= WIDEST
        and q.shape[1] == k.shape[1] == v.shape[1]
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and runs_kernels(q, k, v)
    )


def projects_short(query: Tensor, memory: Tensor | None, maps: Sequence[nn.Linear], heads: int) -> bool:
    """Whether `project_and_attend` takes the tokens and maps; as `attends_short`, without regard to gradients."""
    context = query if memory is None else memory
    return (
        query.is_cuda
        and not torch.is_inference_mode_enabled()
        and query.dtype != torch.float32
        and max(query.shape[1], context.shape[1]) <= LONGEST
        and all(type(linear) is nn.Linear for linear in maps)  # adapters are not
        and maps[0].out_features <= WIDEST * heads
        and runs_kernels(query, context, *(x for linear in maps for x in (linear.weight, linear.bias)))
    )


def attend_short(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    """softmax(q k^T scale) v (B, H, T, V) over keys of valid (B, S), up to the query's position if causal.

    A query that sees no key gets zero.
    """
    heads: Tensor = _Short.apply(q, k, v, valid, scale, causal)  # type: ignore[no-untyped-call]
    return heads


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float, causal: bool) -> Tensor:
        out, valid = _attended(q, k, v, valid, scale, causal)
        ctx.save_for_backward(q, k, v, valid)
        ctx.how = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid = ctx.saved_tensors
        gradients = [_by_position(x, x.shape[2]) for x in (q, k, v)]
        _attended_backward(upstream, q, k, v, valid, gradients, None, *ctx.how)
        return *gradients, None, None, None


def project_and_attend(
    query: Tensor, memory: Tensor | None, maps: Sequence[nn.Linear], valid: Tensor | None, *, heads: int, causal: bool
) -> Tensor:
    """`attend_short` (B, H, T, K) by the maps of queries, keys and values, (H K, D) each, for query (B, T, D).

    memory (B, S, D), None if keys are of the query's tokens. Scores are divided by sqrt(K).
    """
    parameters = [parameter for linear in maps for parameter in (linear.weight, linear.bias)]
    out: Tensor = _ProjectAndAttend.apply(query, memory, valid, heads, causal, *parameters)  # type: ignore[no-untyped-call]
    return out


class _ProjectAndAttend(torch.autograd.Function):
    """One product for all maps of the same tokens; the gradients of their outputs are written side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        memory: Tensor | None,
        valid: Tensor | None,
        heads: int,
        causal: bool,
        *parameters: Tensor,
    ) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        groups = [(query, slice(0, 3))] if memory is None else [(query, slice(0, 1)), (memory, slice(1, 3))]
        tokens, factors, products = [], [], []
        for x, part in groups:
            tokens.append(x.flatten(0, 1))
            factors.append(joined(weights[part]))
            product = torch.addmm(joined(biases[part]), tokens[-1], factors[-1].t())
            products.append(product.view(*x.shape[:2], len(weights[part]), heads, -1))
        q, k, v = _heads_of(products)
        ctx.how = q.shape[3] ** -0.5, causal
        out, valid = _attended(q, k, v, valid, *ctx.how)
        ctx.groups = len(groups)
        ctx.save_for_backward(valid, *tokens, *factors, *products)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        valid, *saved = ctx.saved_tensors
        tokens, factors, products = (saved[n * ctx.groups : (n + 1) * ctx.groups] for n in range(3))
        gradients = [torch.empty_like(product) for product in products]
        q, k, v = _heads_of(products)
        width = q.shape[1] * q.shape[3]
        sums = q.new_empty(len(q), 3 * width, dtype=torch.float32)
        _attended_backward(upstream, q, k, v, valid, _heads_of(gradients), sums, *ctx.how)
        biases = added_rows(sums, like=q).split(width)
        inputs: list[Tensor | None] = []
        weights: list[Tensor] = []
        for x, factor, gradient in zip(tokens, factors, gradients, strict=True):
            rows = gradient.view(len(x), -1)
            inputs.append((rows @ factor).view(*gradient.shape[:2], -1))
            weights += (rows.t() @ x).split(width)
        if ctx.groups == 1:
            inputs.append(None)
        parameters = [gradient for pair in zip(weights, biases, strict=True) for gradient in pair]
        return *inputs, None, None, None, *parameters


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensors (N, ...) as one; without a copy if they follow each other in memory, as rounded weights do."""
    first, storage = parts[0], parts[0].untyped_storage().data_ptr()
    place = first.storage_offset()
    for part in parts:
        if part.storage_offset() != place or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return torch.cat([*parts])
        place += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _heads_of(products: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values (B, H, T, K) in products (B, T, 1, 2 or 3 of them, H, K)."""
    return [part.transpose(1, 2) for product in products for part in product.unbind(2)]


def added_rows(sums: Tensor, like: Tensor) -> Tensor:
    """The sum (D,) over the rows of sums (P, D), in the type of `like`."""
    from mtkit.attention.kernels.gpu import short_kernels

    rows, width = sums.shape
    out = like.new_empty(width)
    short_kernels.add_rows[(-(-width // 32),)](sums, out, rows, WIDTH=width, COLUMNS=32, ROWS=64)
    return out


def _by_position(x: Tensor, length: int) -> Tensor:
    """A new tensor (B, H, length, K) like x (B, H, ..., K), the joined heads of a position side by side in memory."""
    return x.new_empty(x.shape[0], length, x.shape[1], x.shape[3]).transpose(1, 2)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs, and valid as numbers."""
    valid = None if valid is None else valid.contiguous().view(torch.uint8)
    out = _by_position(v, q.shape[2])
    _run("attend", (q, k, v), valid, (out,), scale, causal, (q, k, v))
    return out, valid


def _attended_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    gradients: Sequence[Tensor],
    sums: Tensor | None,
    scale: float,
    causal: bool,
) -> None:
    """Write the gradients of q, k and v, and the sums (B, H (K + K + V)) of each segment's, if there is a place."""
    if upstream.stride(3) != 1:
        upstream = upstream.contiguous()
    others = (upstream, *gradients, q if sums is None else sums)
    strided = (q, k, v, upstream, *gradients)
    _run("attend_backward", (q, k, v), valid, others, scale, causal, strided, SUMMED=sums is not None)


def _run(
    name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    valid: Tensor | None,
    others: Sequence[Tensor],
    scale: float,
    causal: bool,
    strided: Sequence[Tensor],
    **constants: Any,
) -> None:
    """Run a kernel in a program for each head of each segment."""
    from mtkit.attention.kernels.gpu import short_kernels

    q, k, v = qkv
    batch, heads, queries, width = q.shape
    strides = [stride for x in strided for stride in x.stride()[:3]]
    getattr(short_kernels, name)[(batch * heads,)](
        *(q, k, v, q if valid is None else valid, *others),
        *(queries, k.shape[2], heads, scale, *strides),
        KEY=width,
        VALUE=v.shape[3],
        KEYS=_power(width),
        VALUES=_power(v.shape[3]),
        SIDE=32 if max(queries, k.shape[2]) <= 32 else LONGEST,
        CAUSAL=causal,
        MASKED=valid is not None,
        **constants,
    )


def _power(width: int) -> int:
    """The least power of 2 that is no less and that tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
