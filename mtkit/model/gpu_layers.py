"""Parts of training in few kernels on a GPU: a residual sum with dropout and layer norm, a map with relu, the loss.

PyTorch runs a kernel for each sum, dropout and norm, and for the gradient of each vector. Most of the time between
products is reading and writing, of which these kernels (`gpu_kernels`) do half. Dropout's mask is a function of a seed,
which is drawn on the device from PyTorch's generator, and kept for the backward pass in place of the mask.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WIDEST = 2048
"""Most numbers of a row: a program holds whole rows in registers."""

TILE = 1024
"""Numbers of a tile, unless one row has more."""

PROGRAMS = 512
"""Programs that add up columns, about as many as a large GPU runs at a time."""


@cache
def kernels() -> ModuleType | None:
    """The kernels; None if Triton is missing or cannot compile here, as without a C compiler."""
    try:
        from mtkit.model import gpu_kernels

        sums = torch.zeros(1, 16, device="cuda")
        gpu_kernels.add_rows[(1,)](sums, sums[0], 1, WIDTH=16, COLUMNS=16, ROWS=16)
    except Exception:
        return None
    return gpu_kernels


def runs_kernels(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take these tensors, which are all of one type: bfloat16 or float32 on the present GPU."""
    return (
        x.is_cuda
        and x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float32)
        and all(other.dtype == x.dtype for other in others)
        and kernels() is not None
        and x.device.index == torch.cuda.current_device()  # where Triton runs kernels
    )


def trains_fused(x: Tensor, *others: Tensor) -> bool:
    """Whether layers call the kernels: `runs_kernels` for rows that are not too wide, with gradients.

    Other passes have less to save, and need not wait for a compiler.
    """
    return (
        torch.is_grad_enabled()
        and x.shape[-1] <= WIDEST
        and runs_kernels(x, *others)
        and (not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") == x.dtype)
    )


def add_and_norm(x: Tensor, branch: Tensor, shift: Tensor | None, norm: nn.LayerNorm, share: float) -> Tensor:
    """LN(x + dropout(branch + shift)) for x and branch (..., D), shift (D,) or None; `share` is the rate of dropout."""
    normed: Tensor = _AddAndNorm.apply(x, branch, shift, norm.weight, norm.bias, norm.eps, share)  # type: ignore[no-untyped-call]
    return normed


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        share: float,
    ) -> Tensor:
        x, branch = x.contiguous(), branch.contiguous()
        # drawn on the device, so that the host need not wait, and a CUDA graph draws another one each time
        seed = torch.randint(2**62, (1,), device=x.device) if share else None
        width, columns = x.shape[-1], _power(x.shape[-1])
        ctx.rows, ctx.eps = x.numel() // width, eps
        ctx.how = {
            "WIDTH": width,
            "COLUMNS": columns,
            "ROWS": max(1, TILE // columns),
            "DROPPED": round(share * 2**24),
            "SCALE": 1.0 / (1.0 - share),
            "SHIFTED": shift is not None,
        }
        ctx.save_for_backward(x, branch, shift, weight, seed)
        out = torch.empty_like(x)
        programs = -(-ctx.rows // ctx.how["ROWS"])
        _run("add_and_norm", (programs,), x, branch, shift, weight, bias, seed, out, ctx.rows, eps, **ctx.how)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, shift, weight, seed = ctx.saved_tensors
        d_x, width = torch.empty_like(x), x.shape[-1]
        d_branch = d_x if seed is None else torch.empty_like(x)
        programs = min(PROGRAMS, -(-ctx.rows // ctx.how["ROWS"]))
        sums = x.new_empty(programs, (2 if shift is None else 3) * width, dtype=torch.float32)
        given = (x, branch, shift, weight, seed, upstream.contiguous(), d_x, d_branch, sums, ctx.rows, ctx.eps)
        _run("add_and_norm_backward", (programs,), *given, **ctx.how)
        added = _added(sums, like=weight)
        d_shift = None if shift is None else added[2 * width :]
        return d_x, d_branch, d_shift, added[:width], added[width : 2 * width], None, None


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weight^T + bias) (N, O) for x (N, I), weight (O, I), bias (O,)."""
    result: Tensor = _LinearRelu.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _LinearRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result = torch._addmm_activation(bias, x, weight.t())  # cuBLAS's product applies relu too
        ctx.save_for_backward(x, weight, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, result = ctx.saved_tensors
        rows, width = result.shape
        columns = min(_power(width), 256)
        how = {"WIDTH": width, "COLUMNS": columns, "ROWS": TILE // columns}
        across = -(-width // columns)
        down = min(max(1, PROGRAMS // across), -(-rows // how["ROWS"]))
        gradient, sums = torch.empty_like(result), result.new_empty(down, width, dtype=torch.float32)
        _run("relu_backward", (down, across), upstream.contiguous(), result, gradient, sums, rows, **how)
        d_x = gradient @ weight if ctx.needs_input_grad[0] else None
        d_weight = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return d_x, d_weight, _added(sums, like=weight)


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float, smoothed: Tensor, nll: Tensor) -> None:
    """Write the label-smoothed loss (N,) and the plain one for logits (N, V) and target (N,), contiguous tensors.

    The gradient of the smoothed losses' sum replaces the logits.
    """
    rows, vocabulary = logits.shape
    how = {"WIDTH": vocabulary, "COLUMNS": min(_power(vocabulary), 2048), "num_warps": 8}
    _run("cross_entropy", (rows,), logits, target, smoothed, nll, smoothing, **how)


def _added(sums: Tensor, like: Tensor) -> Tensor:
    """The sum (D,) of the rows of sums (P, D), in the type of `like`."""
    rows, width = sums.shape
    out = like.new_empty(width)
    _run("add_rows", (-(-width // 32),), sums, out, rows, WIDTH=width, COLUMNS=32, ROWS=64)
    return out


def _run(name: str, grid: tuple[int, ...], *given: Any, **how: Any) -> None:
    """Run a kernel in a grid of programs; it does not read what is None."""
    kernel = getattr(kernels(), name)
    kernel[grid](*[given[0] if each is None else each for each in given], **how)


def _power(width: int) -> int:
    """The least power of 2 that is no less, as which Triton wants tiles."""
    return 1 << (width - 1).bit_length()
