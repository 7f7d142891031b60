"""Attention of a step's queries to cached keys without gradients, row by row in a compiled loop on the CPU."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAIR, PAIR_OF_SEVERAL = 1.25, 0.6
"""Cost of a pair of query and key, in pairs of PyTorch's products, if a key has one query, and if it has several."""

LOW_PAIR, CONVERTED = 0.6, 2
"""Cost of a pair with a key in bfloat16, and of PyTorch's pair, for which the key must become float32."""

CALL = 8192
"""Cost of the operations around those products, in the same pairs. All were measured on AMD EPYCs with AVX-512."""

_ALL, _NONE = torch.ones(1, dtype=torch.bool), torch.empty(0, 0, 0, 0)


def supports_cached(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_cached` supports these tensors: on the CPU, without gradients, queries in float32.

    It is no operation of PyTorch: under a `TorchDispatchMode`, which counts operations, it supports nothing.
    """
    types = q.dtype == torch.float32 and keys.dtype == values.dtype and keys.dtype in (torch.float32, torch.bfloat16)
    supported = types and all(x.device.type == "cpu" and not x.requires_grad for x in (q, keys, values))
    return supported and torch._C._len_torch_dispatch_stack() == 0


def cached_is_faster(q: Tensor, keys: Tensor, queries: int = 1, hidden: int = 1) -> bool:
    """Whether `attend_cached` is faster than products of all queries (..., K) with all keys (..., L, K).

    Each key has this number of queries. `attend_cached` runs on one core, while products use all threads of PyTorch,
    but reads only visible keys: one in `hidden`.
    """
    pairs = q.numel() // q.shape[-1] * keys.shape[-2]
    low = keys.dtype == torch.bfloat16
    pair = LOW_PAIR if low else PAIR_OF_SEVERAL if queries > 1 else PAIR
    return pair * pairs / hidden <= CALL + (CONVERTED if low else 1) * pairs / torch.get_num_threads()


def attend_cached(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The heads' outputs (B, N, H, V) of queries (B, N, H, K); one that sees no key gets zero.

    Keys (B, N or 1, G, L, K) and values (B, N or 1, G', L, V), in float32 or bfloat16; G and G' divide H; visible
    broadcasts to (B, N, H, L). Hidden rows may hold any value. With factors, which broadcast likewise, the weights of
    values are the scaled products times these numbers, without a softmax.
    """
    from mtkit.attention.kernels.cpu.decoding_loops import attend_rows

    batch, hypotheses, heads, _ = q.shape
    out = torch.empty(batch, hypotheses, heads, values.shape[4])
    if not (out.numel() and keys.numel()):
        return out.zero_()
    seen = (_ALL if visible is None else visible).expand(batch, hypotheses, heads, keys.shape[3])
    rows = *rows_of(q.unsqueeze(3)), *rows_of(keys), *rows_of(values)
    times = _NONE if factors is None else factors.expand(seen.shape)
    attend_rows(*rows, keys.shape[2], values.shape[2], seen.numpy(), np.float32(scale), times.numpy(), out.numpy())
    return out


def rows_of(x: Tensor) -> tuple[NDArray[Any], tuple[int, int, int, int]]:
    """The rows of x (B, N, G, L, K) as a matrix (R, K), and the distances in rows to the next of B, N, G and L.

    The matrix is a view if rows are contiguous and a multiple of K numbers apart. NumPy has no bfloat16: such a matrix
    is of int16, with the same bits.
    """
    batch, hypotheses, groups, length, width = x.shape
    b, n, g, along, within = x.stride()
    if within != 1 or b % width or n % width or g % width or along % width:
        x = x.contiguous()
        b, n, g, along, _ = x.stride()
    last = (batch - 1) * b + (hypotheses - 1) * n + (groups - 1) * g + (length - 1) * along
    rows = x.as_strided((last // width + 1, width), (width, 1))
    matrix = (rows.view(torch.int16) if x.dtype == torch.bfloat16 else rows).numpy()
    return matrix, (b // width, n // width if hypotheses > 1 else 0, g // width, along // width)
