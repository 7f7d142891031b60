"""Softmax of a few queries over cached keys, in one compiled pass on the CPU: what a step of decoding computes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAIR = 1.25
"""What a pair of query and key costs, in pairs of PyTorch's products."""

CALL = 8192
"""What the operations around those products cost, in the same pairs. Both were measured on an AMD EPYC with AVX-512."""

_ALL = torch.ones(1, dtype=torch.bool)


def takes(*tensors: Tensor) -> bool:
    """Whether `attend_cached` takes queries, keys and values like these: in float32, on the CPU, without gradients.

    It is no operation of PyTorch: where these are watched (`TorchDispatchMode`), as to be counted, it takes nothing.
    """
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" and not x.requires_grad for x in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0


def pays(q: Tensor, keys: Tensor, hidden: int = 1) -> bool:
    """Whether `attend_cached` is faster than products of all queries (..., K) with all keys (..., L, K).

    It runs on one core, where products share the threads of PyTorch, but reads visible keys alone: one in `hidden`.
    """
    pairs = q.numel() // q.shape[-1] * keys.shape[-2]
    return PAIR * pairs / hidden <= CALL + pairs / torch.get_num_threads()


def attend_cached(q: Tensor, keys: Tensor, values: Tensor, *, scale: float, visible: Tensor | None = None) -> Tensor:
    """The heads' outputs (B, N, H, V) of queries (B, N, H, K); one that sees no key gets zero.

    Keys (B, N or 1, G, L, K) and values (B, N or 1, G', L, V), where G and G' divide H; visible broadcasts to
    (B, N, H, L). What is not visible may hold any value.
    """
    from mtkit.attention.kernels.cpu.step_attention import attend_rows

    batch, hypotheses, heads, _ = q.shape
    out = torch.empty(batch, hypotheses, heads, values.shape[4])
    if not (out.numel() and keys.numel()):
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
