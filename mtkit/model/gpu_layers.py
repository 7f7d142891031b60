"""Parts of training in few kernels on a GPU: residual sum, dropout and layer norm; the feed-forward layer; the loss.

PyTorch runs a kernel for each sum, dropout and norm, and for the gradient of each vector. Most of their time is reading
and writing; these kernels (`gpu_kernels`) read and write half as much. Dropout's mask is a function of a seed, which is
drawn on the device from PyTorch's generator. The backward pass keeps the seed instead of the mask.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.gpu.short import added_rows
from mtkit.device import runs_kernels

WIDEST = 2048
"""Maximum numbers in a row: a program holds whole rows in registers."""

TILE = 1024
"""Numbers in a tile, which has whole rows; a row with more is a tile of its own."""

PROGRAMS = 512
"""Programs that add up columns, about as many as a large GPU runs at a time."""


def trains_fused(x: Tensor, *others: Tensor) -> bool:
    """Whether layers call the kernels: `runs_kernels` for rows that are not too wide, with gradients.

    Other passes have less to save, and need not wait for a compiler.
    """
    return (
        x.is_cuda
        and torch.is_grad_enabled()
        and x.dtype != torch.float16
        and x.shape[-1] <= WIDEST
        and runs_kernels(x, *others)
        and (not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") == x.dtype)
    )


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm, share: float) -> Tensor:
    """LN(x + dropout(branch)) for x and branch (..., D); `share` is the rate of dropout."""
    normed: Tensor = _AddAndNorm.apply(x, branch, norm.weight, norm.bias, norm.eps, share)  # type: ignore[no-untyped-call]
    return normed


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float, share: float) -> Tensor:
        x, branch = x.contiguous(), branch.contiguous()
        normed, seed = _normed(x, branch, None, weight, bias, eps, share)
        ctx.save_for_backward(x, branch, weight, seed)
        ctx.how = eps, share
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, weight, seed = ctx.saved_tensors
        d_x, d_branch, d_weight, d_bias, _ = _normed_backward(upstream, x, branch, None, weight, seed, *ctx.how)
        return d_x, d_branch, d_weight, d_bias, None, None


def feed_forward_and_norm(x: Tensor, inner: nn.Linear, outer: nn.Linear, norm: nn.LayerNorm, share: float) -> Tensor:
    """LN(x + dropout(outer(relu(inner(x))))) for x (..., D)."""
    weights = inner.weight, inner.bias, outer.weight, outer.bias, norm.weight, norm.bias
    normed: Tensor = _FeedForwardAndNorm.apply(x.flatten(0, -2), *weights, norm.eps, share)  # type: ignore[no-untyped-call]
    return normed.view(x.shape)


class _FeedForwardAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inner: Tensor,
        inner_bias: Tensor,
        outer: Tensor,
        outer_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        share: float,
    ) -> Tensor:
        x = x.contiguous()
        hidden = torch._addmm_activation(inner_bias, x, inner.t())  # relu, which cuBLAS applies in its product
        branch = hidden @ outer.t()
        normed, seed = _normed(x, branch, outer_bias, weight, bias, eps, share)
        ctx.save_for_backward(x, hidden, branch, inner, outer, outer_bias, weight, seed)
        ctx.how = eps, share
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, branch, inner, outer, outer_bias, weight, seed = ctx.saved_tensors
        d_x, d_branch, d_weight, d_bias, d_outer_bias = _normed_backward(
            upstream, x, branch, outer_bias, weight, seed, *ctx.how
        )
        needed = ctx.needs_input_grad
        d_outer = d_branch.t() @ hidden if needed[3] else None
        gradient, d_inner_bias = _relu_backward(d_branch @ outer, hidden)
        d_inner = gradient.t() @ x if needed[1] else None
        d_x.addmm_(gradient, inner)
        return d_x, d_inner, d_inner_bias, d_outer, d_outer_bias, d_weight, d_bias, None, None


@cache
def _constants(width: int, share: float, shifted: bool) -> dict[str, Any]:
    """The constants of kernels for residual sums."""
    columns = _power(width)
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": max(1, TILE // columns),
        "DROPPED": round(share * 2**24),
        "SCALE": 1.0 / (1.0 - share),
        "SHIFTED": shifted,
    }


def _normed(
    x: Tensor, branch: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float, share: float
) -> tuple[Tensor, Tensor | None]:
    """LN(x + dropout(branch + shift)) for shift (D,), and the seed of dropout."""
    rows, how, out = x.numel() // x.shape[-1], _constants(x.shape[-1], share, shift is not None), torch.empty_like(x)
    # drawn on the device, so that the host need not wait, and a CUDA graph draws another one each time
    seed = torch.randint(2**62, (1,), device=x.device) if how["DROPPED"] else None
    _run("add_and_norm", (-(-rows // how["ROWS"]),), x, branch, shift, weight, bias, seed, out, rows, eps, **how)
    return out, seed


def _normed_backward(
    upstream: Tensor,
    x: Tensor,
    branch: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    seed: Tensor | None,
    eps: float,
    share: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, branch, weight, bias and shift, the last empty if there is none."""
    width = x.shape[-1]
    rows, how = x.numel() // width, _constants(width, share, shift is not None)
    d_x = torch.empty_like(x)
    d_branch = d_x if seed is None else torch.empty_like(x)
    programs = min(PROGRAMS, -(-rows // how["ROWS"]))
    sums = x.new_empty(programs, (2 if shift is None else 3) * width, dtype=torch.float32)
    arguments = (x, branch, shift, weight, seed, upstream.contiguous(), d_x, d_branch, sums, rows, eps)
    _run("add_and_norm_backward", (programs,), *arguments, **how)
    added = added_rows(sums, like=weight)
    return d_x, d_branch, added[:width], added[width : 2 * width], added[2 * width :]


def _relu_backward(upstream: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (N, O) of relu's input from its result, and the sum (O,) of its rows."""
    rows, width = result.shape
    columns = min(_power(width), 256)
    how = {"WIDTH": width, "COLUMNS": columns, "ROWS": 2048 // columns}
    across = -(-width // columns)
    down = min(max(1, PROGRAMS // across), -(-rows // how["ROWS"]))
    gradient, sums = torch.empty_like(result), result.new_empty(down, width, dtype=torch.float32)
    _run("relu_backward", (down, across), upstream, result, gradient, sums, rows, **how)
    return gradient, added_rows(sums, like=result)


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float, smoothed: Tensor, nll: Tensor) -> None:
    """Write the label-smoothed loss (N,) and the plain one for logits (N, V) and target (N,), contiguous tensors.

    The gradient of the smoothed losses' sum replaces the logits.
    """
    rows, vocabulary = logits.shape
    how = {"WIDTH": vocabulary, "COLUMNS": min(_power(vocabulary), 2048), "num_warps": 8}
    _run("cross_entropy", (rows,), logits, target, smoothed, nll, smoothing, **how)


def _run(name: str, grid: tuple[int, ...], *arguments: Any, **how: Any) -> None:
    """Run a kernel in a grid of programs; it does not read what is None."""
    from mtkit.model import gpu_kernels

    getattr(gpu_kernels, name)[grid](*[arguments[0] if argument is None else argument for argument in arguments], **how)


def _power(width: int) -> int:
    """The least power of 2 that is not below `width`: Triton requires such tiles."""
    return 1 << (width - 1).bit_length()
