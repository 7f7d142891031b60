"""Sub-layers in int8 decoding that one compiled loop each computes (`mtkit.attention.kernels.cpu.sublayer_loops`).

The loops compute feed-forward layers with ReLU, and steps of plain attention by scaled dot products. All else, steps
whose weights are needed, and row counts for which oneDNN multiplies faster are left to the modules. Both have the same
sums in the same order, so that a result does not depend on which of them computes it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mtkit.attention import State
from mtkit.attention.bases.product_attention import MAX_SHARING
from mtkit.attention.bases.shared_rows import has_one_row_per_position, is_fixed, make_harmless, with_rows
from mtkit.attention.contract import Attention
from mtkit.attention.kernels.cpu.int8 import Int8
from mtkit.attention.kernels.cpu.product import FEW, Int8Tiles, Product
from mtkit.attention.kernels.cpu.threads import in_ranges
from mtkit.attention.scoring.full import Full
from mtkit.attention.slots import Projection
from mtkit.model.layers import DecoderLayer, StackPass
from mtkit.model.sublayers import FeedForward, LayerNorm, Residual, Stream

Int8Of = Callable[..., Product]
"""The prepared `Int8` of one linear map, or of several maps of the same tokens."""


def compiled_methods(module: nn.Module, int8_of: Int8Of) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of the module, by name, that loops replace."""
    if isinstance(module, LayerNorm):
        yield "forward", compiled_norm(module)
    elif isinstance(module, FeedForward) and CompiledFeedForward.possible(module):
        yield "around", CompiledFeedForward(module, int8_of)
    elif isinstance(module, DecoderLayer):
        yield "attend_step", CompiledAttentions(module, int8_of)


def compiled_norm(norm: LayerNorm) -> Callable[[Tensor], Tensor]:
    """The norm of (..., D) in float32, by the loops' sums."""
    from mtkit.attention.kernels.cpu.sublayer_loops import normalise_rows

    weights = _norm(norm)

    def normalised(x: Tensor) -> Tensor:
        x = x.float().contiguous()
        out = torch.empty_like(x)
        normalise_rows(x.view(-1, x.shape[-1]).numpy(), weights, out.view(-1, x.shape[-1]).numpy())
        return out

    return normalised


class _Around:
    """A residual and the products between its ends, in the form of the loops."""

    def __init__(self, residual: Residual, *products: Product) -> None:
        self._products = [cast(Int8, product) for product in products]
        self._computes = type(residual) is Residual
        weights = [cast(Int8Tiles, product.tiles).weights for product in self._products]
        self._arguments = _norm(residual.norm), residual.pre, *weights

    def computes(self, x: Stream) -> bool:
        """Whether the loops compute the sub-layer for x (..., D): not while a dispatch mode counts operations."""
        if not (self._computes and isinstance(x, Tensor) and x.numel() and x.is_contiguous()):
            return False
        rows = x.numel() // x.shape[-1]
        fits = x.dtype == torch.float32 and all(product.tiles_for(rows) for product in self._products)
        return fits and torch._C._len_torch_dispatch_stack() == 0

    def bound(self, loop: Callable[..., None]) -> Callable[..., None]:
        """The loop with its first arguments."""
        return partial(loop, *self._arguments)


class CompiledFeedForward:
    """`FeedForward.around` by a loop."""

    def __init__(self, layer: FeedForward, int8_of: Int8Of) -> None:
        self._layer, self._int8_of = layer, int8_of
        self._around: _Around | None = None

    @staticmethod
    def possible(layer: FeedForward) -> bool:
        """Whether the loop computes such a layer."""
        return layer.activation == "relu" and type(layer.inner) is type(layer.outer) is nn.Linear

    def __call__(self, x: Stream, residual: Residual) -> Stream:
        """The stream after the sub-layer."""
        layer = self._layer
        if self._around is None:
            self._around = _Around(residual, self._int8_of(layer.inner), self._int8_of(layer.outer))
        around = self._around
        if not isinstance(x, Tensor) or not around.computes(x):
            return FeedForward.around(layer, x, residual)
        from mtkit.attention.kernels.cpu.sublayer_loops import feed_forward

        loop = around.bound(feed_forward)
        out = torch.empty_like(x)
        rows, results = (tensor.view(-1, x.shape[-1]).numpy() for tensor in (x, out))
        in_ranges(lambda first, last: loop(rows[first:last], results[first:last]), len(rows), FEW)
        return out


class CompiledAttentions:
    """`DecoderLayer.attend_step` by a loop, for the roles that have plain attention by scaled dot products."""

    def __init__(self, layer: DecoderLayer, int8_of: Int8Of) -> None:
        self._layer = layer
        self._around: dict[str, _Around] = {}
        for role in ("decoder", "cross"):
            attention, residual, _ = layer.attention_parts(role)
            if _is_plain(attention):
                maps = [attention.q_proj] if role == "cross" else [attention.q_proj, attention.k_proj, attention.v_proj]
                self._around[role] = _Around(residual, int8_of(*maps), int8_of(attention.out_proj))

    def __call__(
        self, role: str, x: Stream, state: State, stack_pass: StackPass, need_weights: bool = False
    ) -> tuple[Stream, State, Tensor | None]:
        """The result of `DecoderLayer.attend_step`."""
        around = self._around.get(role)
        shared = around is not None and isinstance(x, Tensor) and _is_shared(state, x.shape[1])
        if around is None or not isinstance(x, Tensor) or not shared or need_weights or not around.computes(x):
            return DecoderLayer.attend_step(self._layer, role, x, state, stack_pass, need_weights)
        attention, _, carry = self._layer.attention_parts(role)
        setattr(stack_pass, carry, None)
        return *_attend(x, state, around, cast(Full, attention)), None


def _attend(x: Tensor, state: State, around: _Around, attention: Full) -> tuple[Tensor, State]:
    """The stream (B, N, D) after the sub-layer and the state after it, from x (B, N, D)."""
    from mtkit.attention.kernels.cpu.sublayer_loops import attend

    segments, hypotheses, _ = x.shape
    if "seen" in state:
        state = with_rows(state, hypotheses)
        length, row = state["rows"], state["rows"] - hypotheses
        seen = None if has_one_row_per_position(state) else state["seen"][:, :, None, :length]
    else:
        state = {**state, "count": state["count"] + 1}
        length, row, seen = state["shared"]["keys"].shape[2], -1, state["shared"]["valid"]
        seen = None if seen is None else seen[:, None, None]
    visible = (torch.ones(1, dtype=torch.bool) if seen is None else seen).expand(
        segments, hypotheses, attention.site.heads, length
    )
    out, scale = torch.empty_like(x), np.float32(attention.scale)
    caches = [state["shared"][name].view(torch.int16) for name in ("keys", "values")]
    arrays: list[Any] = [tensor.numpy() for tensor in (x, *caches, visible, out)]

    loop = around.bound(attend)

    def compute(first: int, last: int) -> None:
        tokens, keys, values, mask, result = (array[first:last] for array in arrays)
        loop(tokens, keys, values, row, mask, scale, result)

    in_ranges(compute, segments, max(FEW // hypotheses, 1))
    if row >= 0:
        make_harmless(state, hypotheses)
    return out, state


def _is_plain(attention: Attention) -> bool:
    """Whether the loop computes steps of the attention."""
    if not isinstance(attention, Full) or attention.positions is not None or attention.merge is not None:
        return False
    projection, maps = attention.projection, (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    return type(projection) is Projection and all(type(linear) is nn.Linear for linear in maps)


def _is_shared(state: State, hypotheses: int) -> bool:
    """Whether the state has keys and values in bfloat16 that the hypotheses share."""
    if is_fixed(state) or hypotheses > MAX_SHARING or "shared" not in state:
        return False
    caches = [state["shared"][name] for name in ("keys", "values")]
    return all(cache.dtype == torch.bfloat16 and cache.is_contiguous() and cache.numel() for cache in caches)


def _norm(norm: LayerNorm) -> tuple[Any, Any, np.float32]:
    return norm.weight.detach().numpy(), norm.bias.detach().numpy(), np.float32(norm.eps)
