"""Products of training in float32, by oneDNN on processors for which it is faster (`packs_float32`).

oneDNN computes a linear layer's output and the gradient of its input; PyTorch's library computes the weight's gradient,
both of whose factors oneDNN would have to transpose first. Weights are not packed: they change with each update. On an
AMD EPYC (Zen 4) oneDNN multiplies 1.15 times as fast with 3,600 rows, and needs no pass for the bias.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.cpu.product import packs_float32


@contextmanager
def float32_products(model: nn.Module) -> Iterator[None]:
    """Inside, linear layers on the CPU, except subclasses, compute by `linear` on processors for which it is faster."""
    linears = [module for module in model.modules() if type(module) is nn.Linear and module.weight.device.type == "cpu"]
    replaced = linears if packs_float32() else []
    for module in replaced:
        module.__dict__["forward"] = partial(_forward, module)
    try:
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) to x W^T + b (..., O), with gradients, but no second derivatives if oneDNN computes it.

    weight (O, I), bias (O,). oneDNN computes float32 on these processors if it is enabled and autocast is
    not; PyTorch computes the rest.
    """
    if not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    # rows: the callers of a function of another shape could not change its result in place
    output: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return output if x.dim() == 2 else output.unflatten(0, x.shape[:-1])


def product(left: Tensor, right: Tensor) -> Tensor:
    """left (M, K) @ right (K, N); without gradients if oneDNN computes it."""
    return _multiply(left, right.t()) if _is_faster(left, right) else left @ right


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        return (
            _multiply(gradient, weight.t()) if for_rows else None,
            gradient.t() @ rows if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies x (..., I) by a matrix faster than PyTorch; it refuses empty factors."""
    enabled = torch._C._get_mkldnn_enabled() and not torch.is_autocast_enabled("cpu")
    if not enabled or x.dim() < 2 or not packs_float32():
        return False
    return all(y.dtype == torch.float32 and y.device.type == "cpu" and y.numel() > 0 for y in (x, weight))
