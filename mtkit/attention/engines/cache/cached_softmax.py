"""Softmax of a few queries over cached keys, in one compiled pass on the CPU: what a step of decoding computes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ONE_CORE = 1 << 15
"""Pairs of queries and keys up to which one core is as fast as PyTorch's products on several."""

_ALL = torch.ones(1, dtype=torch.bool)


def reads_cached(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_cached` takes these: in float32, on the CPU, without gradients, and no work for several cores.

    It is no operation of PyTorch: where these are watched (`TorchDispatchMode`), as to be counted, it takes nothing.
    """
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" and not x.requires_grad for x in (q, keys, values))
    watched = torch._C._len_torch_dispatch_stack() > 0
    return plain and not watched and (q[..., 0].numel() * keys.shape[-2] <= ONE_CORE or torch.get_num_threads() == 1)


def attend_cached(q: Tensor, keys: Tensor, values: Tensor, *, scale: float, visible: Tensor | None = None) -> Tensor:
    """The heads' outputs (B, N, H, V) of queries (B, N, H, K); one that sees no key gets zero.

    Keys (B, N or 1, G, L, K) and values (B, N or 1, G', L, V), where G and G' divide H; visible broadcasts to
    (B, N, H, L). What is not visible may hold any value.
    """
    from mtkit.compiled.step_attention import attend_rows

    batch, hypotheses, heads, _ = q.shape
    out = torch.empty(batch, hypotheses, heads, values.shape[4])
    if not keys.numel():
        return out.zero_()
    seen = (_ALL if visible is None else visible).expand(batch, hypotheses, heads, keys.shape[3])
    rows = *_rows(q.unsqueeze(3)), *_rows(keys), *_rows(values)
    attend_rows(*rows, keys.shape[2], values.shape[2], seen.numpy(), np.float32(scale), out.numpy())
    return out


def _rows(x: Tensor) -> tuple[NDArray[np.float32], tuple[int, int, int, int]]:
    """The rows of x (B, N, G, L, K) as a matrix (R, K), and how many rows further the next of B, N, G and L is.

    The matrix is a view where rows are whole, and a multiple of K numbers apart.
    """
    batch, hypotheses, groups, length, width = x.shape
    b, n, g, along, within = x.stride()
    if within != 1 or b % width or n % width or g % width or along % width:
        x = x.contiguous()
        b, n, g, along, _ = x.stride()
    last = (batch - 1) * b + (hypotheses - 1) * n + (groups - 1) * g + (length - 1) * along
    rows = x.as_strided((last // width + 1, width), (width, 1))
    return rows.numpy(), (b // width, n // width if hypotheses > 1 else 0, g // width, along // width)
